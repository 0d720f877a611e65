// The button switches between the light and the dark style, and the choice lasts until the page is closed. Until the
// button is clicked, or if scripts are disabled, the system's setting determines the style.
document.getElementById("theme").addEventListener("click", function () {
  const root = document.documentElement, set = root.dataset.theme;
  const dark = set ? set === "dark" : matchMedia("(prefers-color-scheme:dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.dispatchEvent(new Event("theme"));
});
