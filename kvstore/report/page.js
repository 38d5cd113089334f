// Draws the plots of the page with plotly.js, which is packed in the page itself. Nothing is fetched.
"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const narrow = () => window.innerWidth < 600;
  root.classList.add("scripted");

  // A colour by its name in the style sheet, as the theme of the moment has it.
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const color = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const resolved = (value) => {
    if (typeof value === "string") return value.startsWith("--") ? color(value) : value;
    if (Array.isArray(value)) return value.map(resolved);
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolved(inner)]));
    return value;
  };
  const axis = (given) => ({
    gridcolor: color("--line"), linecolor: color("--line"), zerolinecolor: color("--line"),
    fixedrange: true, ...given,
  });
  const layoutOf = (figure) => {
    const given = resolved(figure.layout);
    return {
      ...given,
      height: figure.height, autosize: true,
      margin: { l: narrow() ? 48 : 64, r: 12, t: 16, b: 40 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--fg"), size: narrow() ? 11 : 13, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { bgcolor: color("--panel"), bordercolor: color("--line"), font: { color: color("--fg") } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      xaxis: axis(given.xaxis), yaxis: axis(given.yaxis),
    };
  };

  // Low to high: from the panel's grey to the first colour, so that text is readable on all of it.
  const shade = (trace, figure) => {
    const select = document.getElementById("shade");
    const values = figure.shades[select.value];
    const known = values.filter((value) => value !== null);
    const scaled = values.map((value) => (value === null ? 0 : select.value === "uses" ? Math.log1p(value) : value));
    const most = Math.max(...scaled, select.value === "uses" ? Math.log1p(1) : 1);
    const [low, high] = [color("--panel"), color("--c1")].map((text) => text.match(/[\d.]+/g).slice(0, 3).map(Number));
    const mixed = scaled.map((value) => {
      const t = known.length ? value / most : 0;
      return low.map((from, i) => Math.round(from + (high[i] - from) * t));
    });
    const luminance = ([r, g, b]) => {
      const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    trace.marker = { colors: mixed.map((rgb) => `rgb(${rgb.join()})`), line: { color: color("--bg"), width: 1 } };
    trace.textfont = { color: mixed.map((rgb) => (luminance(rgb) > 0.179 ? "#000000" : "#ffffff")) };
    trace.pathbar = { ...trace.pathbar, textfont: { color: color("--fg") } };
    if (narrow()) trace.maxdepth = 6;
  };

  const draw = () => {
    for (const [id, figure] of Object.entries(figures)) {
      const element = document.getElementById(id);
      element.classList.add("drawn");
      const data = resolved(figure.data);
      const layout = layoutOf(figure);
      if (figure.shades) {
        shade(data[0], figure);
        if (element.shownLevel) data[0].level = element.shownLevel;
        layout.margin = { l: 0, r: 0, t: 30, b: 0 };
      }
      Plotly.react(element, data, layout, { displayModeBar: false, responsive: true });
      if (figure.shades && !element.listens) {
        element.listens = true;
        element.on("plotly_icicleclick", (event) => { element.shownLevel = event.nextLevel; });
      }
    }
    root.dataset.drawn = "true";
  };

  const unpack = async (id) => {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };

  const start = async () => {
    const script = document.createElement("script");
    script.textContent = await unpack("plotly");
    document.head.append(script);
    draw();
    document.getElementById("theme").addEventListener("change", (event) => {
      if (event.target.value === "system") delete root.dataset.theme;
      else root.dataset.theme = event.target.value;
      draw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    document.getElementById("shade")?.addEventListener("change", draw);
    document.getElementById("whole")?.addEventListener("click", () => {
      delete document.getElementById("plot-tree").shownLevel;
      draw();
    });
  };
  start().catch((error) => {
    document.getElementById("failed").hidden = false;
    console.error(error);
  });
})();
