"""Looking at what a compile did: pages, dumps, timelines, profiles, traces, logs."""
