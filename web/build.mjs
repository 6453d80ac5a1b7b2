// Builds the report's page into the package: one script, one style sheet, the licences in use.
// `node build.mjs DIR` writes somewhere else, to compare.
import * as esbuild from "esbuild";
import { copyFile, mkdir, readFile, writeFile } from "node:fs/promises";
import path from "node:path";

const out = process.argv[2] ?? "../torchgraft/inspect/assets";
await mkdir(out, { recursive: true });
const built = await esbuild.build({
  entryPoints: { report: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  metafile: true,
});
// A browser ends a script at the first `</script`, wherever it stands.
const script = path.join(out, "report.js");
const text = await readFile(script, "utf8");
await writeFile(script, text.replaceAll("</script", "<\\/script"));
await copyFile("src/page.html", path.join(out, "page.html"));

const packages = new Set();
for (const file of Object.keys(built.metafile.inputs)) {
  const found = /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(file);
  if (found) packages.add(found[1]);
}
packages.add("dagre"); // inside cytoscape-dagre's own bundle
const notices = ["Libraries in report.js, each under its own licence."];
for (const name of [...packages].sort()) {
  const home = path.join("node_modules", name === "dagre" ? "@dagrejs/dagre" : name);
  let about, licence;
  try {
    about = JSON.parse(await readFile(path.join(home, "package.json"), "utf8"));
    licence = await readFile(path.join(home, "LICENSE"), "utf8");
  } catch {
    throw new Error(`${name}: no package.json or LICENSE in ${home}`);
  }
  notices.push(`${about.name} ${about.version} (${about.license})\n\n${licence.trim()}`);
}
await writeFile(path.join(out, "LICENSES.txt"), notices.join(`\n\n${"-".repeat(72)}\n\n`) + "\n");
