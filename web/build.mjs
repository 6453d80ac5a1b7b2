// Builds the report's page into the package: one script, one style sheet, the licences in use.
// `node build.mjs DIR` writes somewhere else, to compare.
import * as esbuild from "esbuild";
import { createHash } from "node:crypto";
import { copyFile, mkdir, readFile, readdir, writeFile } from "node:fs/promises";
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

// What was built from what, so that a test can tell without node whether the two belong together.
const hashes = async (home, names) =>
  Object.fromEntries(
    await Promise.all(
      names.map(async (name) => {
        const text = await readFile(path.join(home, name));
        return [name, createHash("sha256").update(text).digest("hex")];
      }),
    ),
  );
const sources = (await readdir("src")).sort().map((name) => `src/${name}`);
const from = await hashes(".", ["build.mjs", "package-lock.json", "package.json", "tsconfig.json", ...sources]);
const to = await hashes(out, ["LICENSES.txt", "page.html", "report.css", "report.js"]);
await writeFile(path.join(out, "built.json"), JSON.stringify({ from, to }, null, 2) + "\n");
