// Draws the figures of a report from the records in the page. A served page is updated while the run goes on.
"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const views = new Map();
  let tables = read(document);

  function read(page) {
    return JSON.parse(page.getElementById("records").textContent);
  }

  function rows(name) {
    const result = [];
    for (const { shared, columns } of tables[name]) {
      const fields = Object.keys(columns);
      const length = fields.length ? columns[fields[0]].length : 0;
      for (let row = 0; row < length; row += 1) {
        const values = { ...shared };
        for (const field of fields) values[field] = columns[field][row];
        result.push(values);
      }
    }
    return result;
  }

  async function draw(figure) {
    const spec = JSON.parse(figure.querySelector("script").textContent);
    const chart = figure.querySelector(".chart");
    const theme = JSON.parse(document.getElementById("themes").textContent)[dark.matches ? "dark" : "light"];
    spec.datasets = { ...spec.datasets, [figure.dataset.table]: rows(figure.dataset.table) };
    views.get(figure.id)?.finalize();
    const view = await vegaEmbed(chart, spec, {
      actions: false, renderer: "svg", config: theme, tooltip: { theme: dark.matches ? "dark" : "light" },
    });
    views.set(figure.id, view);
    figure.dataset.drawn = "yes";
  }

  async function drawAll() {
    for (const figure of document.querySelectorAll("figure")) {
      await new Promise((go) => { setTimeout(go); }); // lets the browser show the previous figure
      await draw(figure);
    }
    document.body.dataset.drawn = "yes";
  }

  // Shares of the visible range by which both ends of the horizontal axis move; "all" resets the zoom.
  const MOVES = { in: [0.25, -0.25], out: [-0.5, 0.5], left: [-0.5, -0.5], right: [0.5, 0.5] };

  async function zoom(button) {
    const figure = button.closest("figure");
    const { view } = views.get(figure.id);
    const [first, last] = view.scale("x").domain();
    const move = MOVES[button.dataset.zoom];
    const shown = move && [first + move[0] * (last - first), last + move[1] * (last - first)];
    await view.signal(`zoom_${figure.dataset.zoom}`, shown ?? null).runAsync();
  }

  // The fields of a figure's data that people read, and all rows.
  function shown(name) {
    const data = rows(name);
    return [Object.keys(data[0] ?? {}).filter((field) => field !== "place" && !field.startsWith("_")), data];
  }

  function csv(name) {
    const [fields, data] = shown(name);
    const cell = (value) => (/[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
    return [fields, ...data.map((row) => fields.map((field) => row[field]))].map((line) => `${line.map(cell).join(",")}\n`).join("");
  }

  // Downloads a figure as it is shown, or its data as CSV.
  async function save(button) {
    const figure = button.closest("figure");
    const form = button.dataset.save;
    const link = document.createElement("a");
    link.download = `${figure.id.replace("figure-", "")}.${form}`;
    if (form === "csv") {
      link.href = URL.createObjectURL(new Blob([csv(figure.dataset.table)], { type: "text/csv" }));
    } else {
      const { view } = views.get(figure.id);
      await view.background(getComputedStyle(document.body).backgroundColor).runAsync();
      link.href = await view.toImageURL(form, form === "png" ? 2 : 1);
      await view.background("transparent").runAsync();
    }
    link.click();
  }

  function fill(details) {
    const body = details.querySelector("tbody");
    if (!body || body.rows.length) return;
    const [fields, data] = shown(details.dataset.table);
    const head = details.querySelector("thead").insertRow();
    for (const field of fields) head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: field }));
    for (const row of data) {
      const line = body.insertRow();
      for (const field of fields) line.insertCell().textContent = row[field] ?? "none";
    }
  }

  // Updates the page: unchanged figures keep their zoom and get the new rows, everything else is replaced.
  async function renew(text) {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    tables = read(fresh);
    for (const details of fresh.querySelectorAll("details[id]")) {
      if (document.getElementById(details.id)?.open) details.open = true;
    }
    const unchanged = [];
    for (const figure of fresh.querySelectorAll("figure")) {
      const old = document.getElementById(figure.id);
      if (old?.dataset.drawn && old.querySelector("script").textContent === figure.querySelector("script").textContent) {
        figure.querySelector(".chart").replaceWith(old.querySelector(".chart"));
        figure.dataset.drawn = "yes";
        unchanged.push(figure);
      }
    }
    const focused = document.activeElement?.id;
    document.querySelector("main").replaceWith(document.adoptNode(fresh.querySelector("main")));
    document.querySelector("header").replaceWith(document.adoptNode(fresh.querySelector("header")));
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    for (const details of document.querySelectorAll("details[open][data-table]")) fill(details);
    for (const figure of unchanged) await views.get(figure.id).view.data(figure.dataset.table, rows(figure.dataset.table)).runAsync();
    for (const figure of document.querySelectorAll("figure:not([data-drawn])")) await draw(figure);
  }

  async function follow(state) {
    try {
      const answer = await fetch(location.pathname, { headers: { "If-None-Match": state }, cache: "no-store" });
      if (answer.status === 200) {
        await renew(await answer.text());
        state = answer.headers.get("ETag") ?? "";
      }
      document.getElementById("gone").hidden = answer.status < 400;
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      document.getElementById("gone").hidden = false; // the server has stopped
    }
    setTimeout(follow, 2000, state);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-zoom], button[data-save]");
    if (button) (button.dataset.save ? save : zoom)(button);
  });
  document.addEventListener("toggle", (event) => {
    if (event.target.matches("details[data-table]") && event.target.open) fill(event.target);
  }, true);
  dark.addEventListener("change", drawAll);
  drawAll().then(() => {
    if (document.body.dataset.follow !== undefined) follow(document.body.dataset.follow);
  });
})();
