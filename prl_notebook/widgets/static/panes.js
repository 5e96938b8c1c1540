// Named panes of HTML that was rendered (and escaped) by prl_notebook.views. Only a pane that changed is replaced;
// its scroll positions stay. Left out: anything a static page could not show.

const NAMES = ["status", "progress", "queue", "timeline", "curves", "detail"];

function replace(pane, html) {
  const kept = new Map();
  for (const box of pane.querySelectorAll("[data-keep]")) {
    kept.set(box.dataset.keep, [box.scrollLeft, box.scrollTop]);
  }
  pane.innerHTML = html;
  for (const box of pane.querySelectorAll("[data-keep]")) {
    [box.scrollLeft, box.scrollTop] = kept.get(box.dataset.keep) ?? [0, 0];
  }
}

function render({ model, el }) {
  for (const name of NAMES) {
    const pane = document.createElement("div");
    pane.dataset.pane = name;
    el.append(pane);
    const show = () => replace(pane, model.get(name));
    model.on(`change:${name}`, show);
    show();
  }
}

export default { render };
