// Bundles the viewer into geutil/report/static: one script, one style sheet, what brings
// them into the frames of a notebook, and the licences of what the script contains.
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "geutil", "report", "static");
mkdirSync(target, { recursive: true });

const bundle = (entry, name) =>
  build({
    absWorkingDir: here,
    entryPoints: [entry],
    outfile: join(target, name),
    bundle: true,
    minify: true,
    format: "iife",
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    metafile: true,
  });
const result = await bundle("src/main.ts", "viewer.js");
await bundle("src/loader.ts", "loader.js");

// Every package that the bundle was made of, whatever brought it in.
const packages = new Set();
for (const input of Object.keys(result.metafile.inputs)) {
  const match = /^node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input);
  if (match) packages.add(match[1]);
}
const notices = [...packages].sort().map((name) => {
  const folder = join(here, "node_modules", name);
  const { version } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const licence = readFileSync(join(folder, "LICENSE"), "utf8").trim();
  return `${name} ${version}\n\n${licence}\n`;
});
writeFileSync(join(target, "LICENSES.txt"), notices.join(`\n${"-".repeat(72)}\n\n`));
