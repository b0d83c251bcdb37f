// Drives report pages in headless Chromium, offline: node drive_page.mjs ONE.html SEVERAL.html
import puppeteer from "puppeteer-core";

const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"],
});
const page = await browser.newPage();
const errors = [], requests = [];
page.on("pageerror", error => errors.push(String(error)));
page.on("console", message => message.type() === "error" && errors.push(message.text()));
page.on("request", request => requests.push(request.url().slice(0, 40)));
await page.setOfflineMode(true);
const check = (condition, text) => condition || errors.push(text);

for (const path of process.argv.slice(2)) {
  await page.setViewport({ width: 1300, height: 1000 });
  await page.goto(`file://${path}`);
  const shown = await page.$$eval("figure", figures => figures.filter(each => !each.hidden).length);
  check(shown > 0, `${path}: no chart`);
  const first = await page.evaluate(() => CHARTS.findIndex(chart => !chart.figure.hidden));
  const box = await (await page.$("figure:not([hidden]) canvas")).boundingBox();
  await page.mouse.move(box.x + box.width * 0.5, box.y + 100);
  check(await page.$(".tip"), `${path}: no values under the pointer`);
  const range = () => page.evaluate(index => CHARTS[index].scale.slice(0, 2), first);
  const before = await range();
  await page.mouse.move(box.x + 150, box.y + 100);
  await page.mouse.down();
  await page.mouse.move(box.x + 250, box.y + 110, { steps: 5 });
  await page.mouse.up();
  check(String(await range()) !== String(before), `${path}: dragging does not zoom`);
  await page.mouse.click(box.x + 150, box.y + 100, { count: 2 });
  check(String(await range()) === String(before), `${path}: a double click does not reset`);
  for (const axis of ["tokens_seen", "hours"]) await page.select("select", axis);
  await page.evaluate(() => [...document.querySelectorAll("nav button")].at(-1).click());
  await page.evaluate(() => document.querySelector("input[type=checkbox]")?.click());
  await page.setViewport({ width: 390, height: 844 });
  await new Promise(resolve => setTimeout(resolve, 200));
  const [width, screen] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  check(width <= screen, `${path}: a phone scrolls sideways`);
}
check(requests.every(url => url.startsWith("file:") || url.startsWith("data:")), `requests ${requests}`);
console.log("errors", errors, "requests", requests.length);
await browser.close();
process.exit(errors.length ? 1 : 0);
