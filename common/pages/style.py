"""Template: the style of the page, for screens, dark screens, phones and paper."""

from fedsurrogate.common.pages.svg import theme

STYLE = """\
<style>
:root { color-scheme: light dark; --page: #f4f6f9; --line: #dde2ea; LIGHT
  --good: #00704f; --bad: #b3261e; --bad-back: #fdeceb; --mark: #fff4d6; --warn: #b07800; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --page: #11161d; --line: #2e3846; DARK
  --good: #5fd0a8; --bad: #ff9a91; --bad-back: #3a1d1c; --mark: #3d3314; --warn: #d9a93a; --accent: #6cb8e6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; overflow-wrap: anywhere; -webkit-text-size-adjust: 100%; }
main { max-width: 1100px; margin: 0 auto; padding: 40px 24px 56px; }
h1 { font-size: clamp(21px, 3.2vw, 30px); line-height: 1.28; font-weight: 650; letter-spacing: -.012em; margin: 6px 0 24px;
  text-wrap: balance; }
h2 { font-size: 17px; font-weight: 650; margin: 0 0 10px; }
h3 { font-size: 13px; font-weight: 600; margin: 0 0 6px; color: var(--quiet); text-align: center; }
p { margin: 0 0 10px; max-width: 76ch; }
.quiet, .eyebrow { color: var(--quiet); }
.eyebrow { font-size: 13px; margin: 0; }
.banner { border: 1px solid var(--bad); border-left-width: 5px; border-radius: 8px; background: var(--bad-back);
  padding: 14px 18px; margin: 0 0 24px; }
.banner h2 { color: var(--bad); margin: 0 0 4px; }
.banner.little { border-color: var(--warn); background: var(--mark); }
.banner.little h2 { color: var(--ink); }
.banner ul { margin: 6px 0 0; padding-left: 20px; }
.tiles { display: flex; flex-wrap: wrap; gap: 1px; margin: 0 0 24px;
  background: var(--line); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
.tile { flex: 1 1 150px; background: var(--card); padding: 14px 18px; }
.tile dt { font-size: 13px; color: var(--quiet); }
.tile dd { margin: 0; font-size: 22px; white-space: nowrap; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile dd.quiet { font-size: 13px; white-space: normal; font-weight: 400; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 20px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin: 0; min-width: 0; }
.wide { grid-column: 1 / -1; }
.alone { display: grid; grid-template-columns: minmax(0, 640px) minmax(0, 1fr); gap: 28px; align-items: center; }
.alone .plots svg { max-width: 480px; }
.csv { margin: 10px 0 0; font-size: 13px; }
a { color: var(--accent); }
.wide .plots { grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); }
.plots { display: grid; gap: 16px; padding: 8px; margin: 0 -8px; }
.plots svg { display: block; width: 100%; max-width: 600px; height: auto; margin: 0 auto; }
.plots svg * { stroke-linejoin: round; stroke-linecap: butt; }
.plots text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif !important; }
figcaption { font-size: 14px; color: var(--quiet); margin-top: 10px; }
section.card, footer.card { margin-top: 20px; }
.plain { margin: 0 0 14px; padding-left: 20px; max-width: 82ch; }
.before { margin-bottom: 2px; }
.kind { white-space: nowrap; }
.after { margin-top: 10px; font-size: 14px; }
.rest { columns: 3 260px; column-gap: 28px; margin: 14px 0 0; padding: 0; list-style: none; font-size: 13px; }
.rest li { break-inside: avoid; padding: 2px 0; }
.scroll { overflow: auto; max-height: 640px;
  background: linear-gradient(to right, var(--card) 30%, transparent) left / 36px 100% no-repeat local,
    linear-gradient(to left, var(--card) 30%, transparent) right / 36px 100% no-repeat local,
    linear-gradient(to right, var(--rule), transparent) left / 10px 100% no-repeat scroll,
    linear-gradient(to left, var(--rule), transparent) right / 10px 100% no-repeat scroll; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--quiet); position: sticky; top: 0; background: var(--card);
  box-shadow: inset 0 -1px var(--line); white-space: nowrap; }
th, td { padding: 6px 18px 6px 0; vertical-align: top; }
td { border-bottom: 1px solid var(--line); }
tbody tr:last-child td { border-bottom: 0; }
.confusion td.cell { text-align: right; background: color-mix(in srgb, var(--accent) calc(var(--share) * 55%), transparent); padding: 8px 7px; }
.confusion th.number { padding: 6px 7px; }
.confusion td, .confusion th { white-space: nowrap; }
.grid section.card { margin-top: 0; }
.limits { display: block; white-space: nowrap; font-size: 12px; }
.dense th { white-space: normal; vertical-align: bottom; }
.dense th, .dense td { padding-right: 8px; overflow-wrap: break-word; }
.dense .limits { font-size: 11px; }
.number { text-align: right; white-space: nowrap; }
.name { min-width: 15ch; }
.reason { min-width: 20ch; width: 45%; }
.bad { color: var(--bad); font-weight: 600; }
.good { color: var(--good); }
.good, .bad { white-space: nowrap; }
code { font-size: 13px; font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.changed td { background: var(--mark); }
.changed td:first-child, th:first-child, td:first-child { padding-left: 8px; }
.changed td:nth-child(2) { font-weight: 700; }
footer { font-size: 13px; color: var(--quiet); }
footer dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0; }
footer dd { margin: 0; }
@media screen and (max-width: 760px) {
  main { padding: 24px 14px 40px; }
  .grid, .alone { grid-template-columns: minmax(0, 1fr); }
  .card { padding: 14px; }
  .tile { padding: 12px 14px; }
  .tile dd { font-size: 20px; }
  .dense thead { display: none; }
  .dense tr { display: block; padding: 6px 0; border-bottom: 1px solid var(--line); }
  .dense tbody tr:last-child { border-bottom: 0; }
  .dense td { display: flex; justify-content: space-between; gap: 12px; padding: 2px 8px; border: 0; text-align: right; }
  .dense td::before { content: attr(data-name); color: var(--quiet); text-align: left; }
  .dense .limits { display: inline; font-size: 12px; }
}
@media print {
  :root { color-scheme: light; LIGHT --page: #fff; --ink: #000; --quiet: #444; --line: #bbb; --bad: #b3261e;
    --bad-back: #fff; --good: #00704f; --mark: #f3efe0; }
  body { font-size: 12px; }
  main { padding: 0; max-width: none; }
  .scroll { max-height: none; overflow: visible; }
  .card, .banner, .tiles { break-inside: avoid; }
  section.card { break-inside: auto; }
  th { position: static; }
  tr { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
</style>
""".replace("LIGHT", theme(dark=False)).replace("DARK", theme(dark=True))


def page_head(title: str) -> str:
    """The start of a page, up to its styles. title: text or Jinja, with its special characters
    escaped.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n{STYLE}'
    )
