// Print the results of the site's own search, best first, as JSON: node search.js SITE QUERY...
// Each result is [page with anchor, title]. The scripts of the site run with a document that has no elements.
const fs = require("fs"), path = require("path"), vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const nothing = { hasChildNodes: () => false, firstChild: null, addEventListener: () => {}, dataset: {} };
const document = {
  ...nothing, readyState: "loading", getElementById: () => nothing, querySelectorAll: () => [],
  documentElement: nothing, body: nothing,
};
const storage = { setItem: () => {}, getItem: () => null };
const context = vm.createContext({
  location: { search: "" }, document, console, localStorage: storage, SPHINX_HIGHLIGHT_ENABLED: false, _: (text) => text,
  _ready: () => {}, DOCUMENTATION_OPTIONS: {}, URLSearchParams,
});
context.window = context;
const read = (name) => fs.readFileSync(path.join(site, name), "utf8");
const scripts = ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"].map(read);
vm.runInContext(`${scripts.join("\n;\n")}
;globalThis.find = (query) => Search._performSearch(...Search._parseQuery(query)).reverse();`, context);
const found = queries.map((query) => context.find(query).map(([page, title, anchor]) => [page + anchor, title]));
console.log(JSON.stringify(found));
