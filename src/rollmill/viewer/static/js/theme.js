// The theme is set before the first paint: a classic script, run in the head.
"use strict";
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const read = () => {
    try { return localStorage.getItem("rollmill.theme"); } catch { return null; }
  };
  const apply = () => {
    const chosen = read();
    root.dataset.theme = chosen || (system.matches ? "dark" : "light");
    root.dataset.themeChoice = chosen || "auto";
    root.dispatchEvent(new Event("themechange"));
  };
  window.rollmillTheme = {
    next() {
      const order = { auto: system.matches ? "light" : "dark", light: "dark", dark: "light" };
      try { localStorage.setItem("rollmill.theme", order[root.dataset.themeChoice]); } catch { /* private mode */ }
      apply();
    },
  };
  system.addEventListener("change", apply);
  apply();
})();
