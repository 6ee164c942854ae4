// What a page of the documentation site shows, as a list of faults; check_site.py runs it in each page.
// `width` is that of the window.
(width) => {
  const faults = [];
  const say = (text) => faults.includes(text) || faults.push(text);
  const name = (node) => {
    const classes = [...node.classList].slice(0, 2).map((each) => `.${each}`).join("");
    const text = (node.alt || node.textContent || "").trim().replace(/\s+/g, " ").slice(0, 40);
    return `<${node.tagName.toLowerCase()}${classes}> '${text}'`;
  };
  const style = (node) => getComputedStyle(node);
  const isShown = (node) => node.checkVisibility() && node.getClientRects().length > 0 && style(node).clip !== "rect(0px, 0px, 0px, 0px)";
  const scrolls = (node) => ["auto", "scroll"].includes(style(node).overflowX);
  const isInScroller = (node) => {
    for (let each = node.parentElement; each && each !== document.body; each = each.parentElement) if (scrolls(each)) return true;
    return false;
  };

  const page = document.documentElement.scrollWidth;
  if (page > width) say(`the page is ${page} pixels wide`);

  for (const node of document.querySelectorAll(".md-content *, .md-header *, .md-footer *, .md-tabs *")) {
    if (!isShown(node) || node.closest("svg, .md-search, .md-header__topic:not(.md-header__topic--active) ~ *")) continue;
    const box = node.getBoundingClientRect();
    if (box.width && (box.right > width + 1 || box.left < -1) && !isInScroller(node) && !node.closest(".md-header__title"))
      say(`from ${Math.round(box.left)} to ${Math.round(box.right)} pixels: ${name(node)}`);
    const hides = ["hidden", "clip"].includes(style(node).overflowX);
    if (hides && node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 1 && !node.closest(".md-header__title"))
      say(`hides ${node.scrollWidth - node.clientWidth} pixels of its content: ${name(node)}`);
  }

  for (const image of document.images) if (image.complete && !image.naturalWidth) say(`is not loaded: ${name(image)}`);

  for (const block of document.querySelectorAll(".highlight[class*=language-] pre > code")) {
    const language = block.closest(".highlight").className.match(/language-(\w+)/)[1];
    const colors = new Set([...block.querySelectorAll("span[class]")].map((each) => style(each).color));
    colors.delete(style(block).color);
    const isPlain = language === "text" || (language === "sh" && !block.textContent.trim().includes("\n")); // only words
    if (!isPlain && !colors.size) say(`is not highlighted: ${language} '${block.textContent.trim().slice(0, 40)}'`);
  }
  return faults;
}
