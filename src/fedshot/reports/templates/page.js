"use strict";
// Sorts tables on click, and draws the figures in the page's colour scheme.
(() => {
  const all = (what, at = document) => [...at.querySelectorAll(what)];
  const root = document.documentElement;

  // Rows are sorted within their tbody, so baselines stay below the methods.
  const key = (row, i) => {
    const value = row.cells[i].dataset.value ?? row.cells[i].textContent;
    return Number.isNaN(Number(value)) ? value : Number(value);
  };
  const order = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));

  for (const head of all("table.sortable thead th")) {
    head.querySelector("button")?.addEventListener("click", () => {
      const first = head.classList.contains("text") ? "ascending" : "descending";
      const other = first === "ascending" ? "descending" : "ascending";
      const now = head.getAttribute("aria-sort") === first ? other : first;
      for (const th of all("th[aria-sort]", head.parentNode)) th.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", now);
      const sign = now === "ascending" ? 1 : -1;
      for (const body of head.closest("table").tBodies) {
        const rows = [...body.rows].filter((row) => !row.classList.contains("section"));
        rows.sort((a, b) => sign * order(key(a, head.cellIndex), key(b, head.cellIndex)));
        body.append(...rows);
      }
    });
  }

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const narrow = window.matchMedia("(max-width: 34rem)");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)");

  const template = () => {
    const [ink, soft, line, panel] = ["--ink", "--soft", "--line", "--panel"].map(colour);
    const axis = {
      gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true,
      ticks: "outside", ticklen: 5, tickcolor: "rgba(0,0,0,0)",
      title: { standoff: 12, font: { size: 13 } },
    };
    const heat = [0, 1, 2].map((i) => [i / 2, colour(`--heat-${i}`)]);
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: soft },
        xaxis: axis, yaxis: axis,
        legend: { font: { color: ink, size: 13 } },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
        hoverlabel: { bgcolor: panel, bordercolor: line, font: { color: ink } },
      },
      data: { heatmap: [{ colorscale: heat, colorbar: { outlinewidth: 0, thickness: 12 } }] },
    };
  };

  const figures = all("script[data-for]").map((script) => {
    const place = document.getElementById(script.dataset.for);
    return {
      place, choices: JSON.parse(script.textContent), chosen: 0,
      buttons: all(".switch button", place.parentNode),
    };
  });

  const draw = (figure, width) => {
    const { data, layout } = structuredClone(figure.choices[figure.chosen]);
    if (narrow.matches) layout.height = layout.meta.narrow;
    // On touch screens, dragging over a figure scrolls the page.
    Object.assign(layout, { template: template(), dragmode: touch.matches ? false : "zoom" });
    if (width) Object.assign(layout, { width, autosize: false });
    return Plotly.react(figure.place, data, layout, {
      displaylogo: false, responsive: !width, modeBarButtons: [["toImage", "resetScale2d"]],
      displayModeBar: touch.matches ? false : "hover",
    });
  };

  const unpack = async () => {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };

  const start = async () => {
    await unpack();
    for (const figure of figures) {
      figure.buttons.forEach((button, i) => {
        button.addEventListener("click", () => {
          figure.chosen = i;
          figure.buttons.forEach((b, j) => b.setAttribute("aria-pressed", String(i === j)));
          draw(figure);
        });
      });
      await draw(figure);
    }
    const redraw = () => figures.forEach((figure) => draw(figure));
    for (const media of [narrow, dark]) media.addEventListener("change", redraw);
    // Prints use light colours and a fixed width.
    window.addEventListener("beforeprint", () => {
      root.classList.add("printing");
      figures.forEach((figure) => draw(figure, 600));
    });
    window.addEventListener("afterprint", () => {
      root.classList.remove("printing");
      redraw();
    });
    root.dataset.drawn = "yes";
  };

  if (figures.length) {
    start().catch((error) => {
      for (const { place } of figures) {
        place.textContent = `This figure needs a browser of 2023 or newer (${error}).`;
      }
    });
  }
})();
