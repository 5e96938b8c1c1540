// Named panes of HTML that was rendered (and escaped) by prl_notebook.views. A pane is brought up to date while it can be
// seen, and only where it differs, so the rest is not laid out again and keeps its scroll position, hover and focus.
// Left out: anything a static page could not show.

const SHARE = 1 / 60; // of the time, at most, is spent on drawing what a run that goes on sends ...
const LONGEST_PAUSE = 1500; // ... but it is drawn at least this often (ms)
const NAMES = ["status", "progress", "queue", "timeline", "curves", "detail"];

// Turns `old` into `fresh`, child by child.
function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType !== Node.ELEMENT_NODE || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  morphChildren(old, fresh);
}

function morphChildren(old, fresh) {
  const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
  after.forEach((node, i) => { i < before.length ? morph(before[i], node) : old.append(node); });
  before.slice(after.length).forEach((node) => node.remove());
}

function render({ model, el }) {
  const drawn = new Map(); // pane element -> the HTML it shows
  const inView = new Set();
  const show = (pane) => {
    const html = model.get(pane.dataset.pane);
    if (document.hidden || !inView.has(pane) || drawn.get(pane) === html) return;
    drawn.set(pane, html);
    const template = document.createElement("template"); // inert: parsed, but neither styled nor laid out
    template.innerHTML = html;
    morphChildren(pane, template.content);
  };
  let timer, earliest = 0;
  const draw = () => {
    timer = undefined;
    const start = performance.now();
    panes.forEach(show);
    const scripted = performance.now() - start;
    requestAnimationFrame((frame) => setTimeout(() => { // by now the page is laid out and painted
      const cost = scripted + performance.now() - frame;
      earliest = performance.now() + Math.min(LONGEST_PAUSE, cost / SHARE);
    }));
  };
  const news = () => {
    if (!model.get("live")) { // the run stands still: show where, at once
      clearTimeout(timer);
      timer = undefined;
      earliest = 0;
    }
    timer ??= setTimeout(draw, Math.max(0, earliest - performance.now()));
  };
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      inView[isIntersecting ? "add" : "delete"](target);
      show(target);
    }
  });
  const panes = NAMES.map((name) => {
    const pane = document.createElement("div");
    pane.dataset.pane = name;
    el.append(pane);
    inView.add(pane);
    show(pane); // once wherever it is, so that the page has its length
    model.on(`change:${name}`, news);
    observer.observe(pane);
    return pane;
  });
  const awake = () => panes.forEach(show);
  document.addEventListener("visibilitychange", awake);
  return () => {
    clearTimeout(timer);
    observer.disconnect();
    document.removeEventListener("visibilitychange", awake);
  };
}

export default { render };
