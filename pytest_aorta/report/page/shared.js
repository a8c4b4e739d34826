"use strict";
// The theme, and plots that fit the window.

// The theme is the system's unless the reader chooses another with the button #theme; colors of drawings are custom
// properties of the style, so drawings have to be drawn again after a change.
const aortaTheme = (() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const themes = ["system", "light", "dark"];
  let theme = "system";
  try { theme = localStorage.getItem("aorta-theme") || theme; } catch { /* a page opened from a file may have no storage */ }

  function follow(redraw) {
    const button = document.getElementById("theme");
    function show() {
      root.dataset.theme = theme === "system" ? (system.matches ? "dark" : "light") : theme;
      button.textContent = `Theme: ${theme}`;
      redraw();
    }
    button.addEventListener("click", () => {
      theme = themes[(themes.indexOf(theme) + 1) % themes.length];
      try { localStorage.setItem("aorta-theme", theme); } catch { /* no storage, see above */ }
      show();
    });
    system.addEventListener("change", show);
    show();
  }
  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name.replaceAll("_", "-")}`).trim();
  return { follow, color, isDark: () => root.dataset.theme === "dark" };
})();

// Fits plots, by their figures, to the width of the window whenever it changes.
const aortaFitToWindow = (drawn) => {
  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => drawn.forEach((plot, figure) => {
      plot.setSize({ width: figure.querySelector(".canvas").clientWidth, height: plot.height });
    }), 100);
  });
};
