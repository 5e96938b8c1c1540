// Named panes of HTML that was rendered (and escaped) by prl_notebook.views. A pane is brought up to date while it can be
// seen, and only where it differs, so the rest is not laid out again and keeps its scroll position, hover and focus.
// Left out: anything a static page could not show.

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
  const inView = new Set(); // or near it
  const show = (pane) => {
    const html = model.get(pane.dataset.pane);
    if (document.hidden || !inView.has(pane) || drawn.get(pane) === html) return;
    drawn.set(pane, html);
    const template = document.createElement("template"); // inert: parsed, but neither styled nor laid out
    template.innerHTML = html;
    morphChildren(pane, template.content);
  };
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      inView[isIntersecting ? "add" : "delete"](target);
      show(target);
    }
  }, { rootMargin: "200px" });
  const panes = NAMES.map((name) => {
    const pane = document.createElement("div");
    pane.dataset.pane = name;
    el.append(pane);
    inView.add(pane);
    show(pane); // once wherever it is, so that the page has its length
    model.on(`change:${name}`, () => show(pane));
    observer.observe(pane);
    return pane;
  });
  const awake = () => panes.forEach(show);
  document.addEventListener("visibilitychange", awake);
  return () => {
    observer.disconnect();
    document.removeEventListener("visibilitychange", awake);
  };
}

export default { render };
