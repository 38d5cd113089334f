// Looks at a page of `kvstore report` in headless Chromium: 390 and 1,280 px, light and dark. Fails on console errors,
// requests, text that is wider than the page, plots that are not drawn, and serious findings of axe-core.
//   node tools/report_check.mjs PAGE FOLDER-FOR-SCREENSHOTS MODULES
import { createRequire } from "node:module";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, statSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [page, folder, modules] = process.argv.slice(2).map((path) => resolve(path));
const require = createRequire(join(modules, "package.json"));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const MOST_BYTES = 3_000_000;
const failures = [];
const expect = (good, what) => { if (!good) failures.push(what); };

const bytes = statSync(page).size;
expect(bytes < MOST_BYTES, `${bytes} bytes, expected less than ${MOST_BYTES}`);
mkdirSync(folder, { recursive: true });
const profile = mkdtempSync(join(tmpdir(), "kvstore-report-"));
const options = {
  executablePath: process.env.CHROMIUM || "/usr/bin/chromium",
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync"],
};
const context = await chromium.launchPersistentContext(profile, options);

const look = async (width, theme) => {
  const where = `${width} px, ${theme}`;
  const tab = await context.newPage();
  await tab.setViewportSize({ width, height: 900 });
  await tab.emulateMedia({ colorScheme: theme, reducedMotion: "reduce" });
  tab.on("console", (message) => expect(message.type() !== "error", `${where}: console: ${message.text()}`));
  tab.on("pageerror", (error) => failures.push(`${where}: ${error}`));
  tab.on("request", (request) => {
    const own = /^(data|blob):/.test(request.url()) || request.url() === pathToFileURL(page).href;
    expect(own, `${where}: asks for ${request.url()}`);
  });
  await tab.goto(pathToFileURL(page).href);
  await tab.waitForSelector("html[data-drawn]", { timeout: 60_000 });
  const wide = await tab.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  expect(wide <= 0, `${where}: ${wide} px wider than the page`);
  const plots = await tab.evaluate(() =>
    [...document.querySelectorAll(".plot")].map((each) => [each.id, each.querySelectorAll("svg.main-svg").length,
      each.scrollWidth - each.clientWidth]));
  for (const [id, drawn, over] of plots) {
    expect(drawn > 0, `${where}: ${id} is not drawn`);
    expect(over <= 0, `${where}: ${id} is ${over} px wider than its place`);
  }
  await tab.screenshot({ path: join(folder, `${basename(page, ".html")}-${width}-${theme}.png`), fullPage: true });
  await tab.evaluate(() => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
  await tab.evaluate(axe);
  const found = await tab.evaluate(async () => (await axe.run(document)).violations.map((each) =>
    ({ id: each.id, impact: each.impact, help: each.help, nodes: each.nodes.map((node) => node.html.slice(0, 160)) })));
  for (const each of found) {
    const text = `${where}: axe: ${each.impact}: ${each.id}: ${each.help}: ${each.nodes.slice(0, 3).join(" | ")}`;
    if (["serious", "critical"].includes(each.impact)) failures.push(text);
    else console.log(text);
  }
  const narrow = await tab.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  expect(narrow <= 0, `${where}: with all tables open ${narrow} px wider than the page`);
  return tab;
};

// The switch, the colours of the tree and a step into it change what is drawn.
const use = async (tab) => {
  const paint = () => tab.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const before = await paint();
  await tab.selectOption("#theme", "dark");
  expect(await paint() !== before, "the theme switch changes nothing");
  await tab.selectOption("#theme", "light");
  expect(await paint() === before, "the theme switch does not lead back");
  if (!(await tab.$("#shade"))) return;
  const slices = () => tab.$$eval("#plot-tree .slice path.surface", (all) => all.map((each) => each.style.fill).join());
  const colours = await slices();
  await tab.selectOption("#shade", "probability");
  await tab.waitForFunction((old) =>
    [...document.querySelectorAll("#plot-tree .slice path.surface")].map((each) => each.style.fill).join() !== old, colours);
  const count = (await tab.$$("#plot-tree .slice")).length;
  await tab.locator("#plot-tree").scrollIntoViewIfNeeded();
  const box = await (await tab.$$("#plot-tree .slice path.surface"))[Math.min(2, count - 1)].boundingBox();
  await tab.mouse.click(box.x + box.width / 2, box.y + box.height / 2);
  await tab.waitForFunction(() => document.getElementById("plot-tree").shownLevel);
  await tab.click("#whole");
  expect(await tab.evaluate(() => !document.getElementById("plot-tree").shownLevel), "the whole tree is not shown again");
};

// Without JavaScript everything but the plots is there.
const plain = async () => {
  const browser = await chromium.launch(options);
  const bare = await browser.newContext({ javaScriptEnabled: false, viewport: { width: 390, height: 900 } });
  const tab = await bare.newPage();
  await tab.goto(pathToFileURL(page).href);
  const text = await tab.innerText("body");
  for (const words of ["Parts of the folder", "Savings", "The plots need JavaScript"])
    expect(text.includes(words), `without JavaScript: ${words} is not there`);
  await browser.close();
};

try {
  for (const width of [390, 1280])
    for (const theme of ["light", "dark"]) {
      const tab = await look(width, theme);
      if (width === 1280 && theme === "light") await use(tab);
      await tab.close();
    }
  await plain();
} finally {
  await context.close();
  rmSync(profile, { recursive: true, force: true });
}
for (const each of failures) console.error(each);
console.log(`${page}: ${bytes} bytes, ${failures.length} failures`);
process.exit(failures.length ? 1 : 0);
