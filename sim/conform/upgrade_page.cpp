// The way from one engine to another as one HTML page that needs no other.
#include <fmt/format.h>

#include "base/markup.h"
#include "base/number_text.h"
#include "sim/conform/upgrade.h"

namespace lockstep {
namespace {

constexpr std::string_view kHead = R"(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Lockstep: what an upgrade costs</title>
<style>
body { max-width: 1100px; margin: 0 auto; padding: 28px 24px; color: #1b2430;
       font: 14px/1.5 system-ui, "DejaVu Sans", sans-serif; }
table { border-collapse: collapse; }
th, td { padding: 4px 14px; border-bottom: 1px solid #d9dee5; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.same { color: #98a4b3; } .changed { font-weight: 600; color: #0072b2; }
.dim { color: #5c6877; }
</style>
</head>
<body>
)";

std::string row_of(const UpgradeStage& stage, const UpgradeStage* before) {
  std::string row = fmt::format("<tr><td>{}</td>", escaped_for_markup(stage.engine));
  if (!stage.refused.empty())
    return row + fmt::format("<td colspan=\"{}\">does not start: {}</td></tr>\n",
                             cost_columns().size(), escaped_for_markup(stage.refused));
  for (const CostColumn& column : cost_columns()) {
    const std::int64_t value = stage.costs.*column.member;
    const bool is_same = before != nullptr && before->costs.*column.member == value;
    row += fmt::format("<td class=\"{}\">{}</td>",
                       is_same             ? "same"
                       : before != nullptr ? "changed"
                                           : "",
                       with_commas(value));
  }
  return row + "</tr>\n";
}

std::string reasons_of(const UpgradeStage& stage, const UpgradeStage& before) {
  std::string text = fmt::format("<h2>{}</h2>\n<p>{}</p>\n", escaped_for_markup(stage.engine),
                                 escaped_for_markup(change_text(before.costs, stage.costs)));
  if (stage.because.empty()) return text + "<p class=\"dim\">No policy does it alone.</p>\n";
  text += "<ul>\n";
  for (const PolicyCost& cost : stage.because)
    text +=
        fmt::format("<li><code>{} = {}</code> alone: {}<br><span class=\"dim\">{}</span></li>\n",
                    cost.policy->name, cost.policy->word(cost.value),
                    escaped_for_markup(change_text(before.costs, cost.costs)),
                    escaped_for_markup(cost.policy->effect));
  return text + "</ul>\n";
}

}  // namespace

std::string upgrade_page(const std::string& trace, const std::vector<UpgradeStage>& stages) {
  std::string page(kHead);
  page +=
      fmt::format("<h1>What an upgrade costs</h1>\n<p class=\"dim\">{}</p>\n<table>\n<tr><th></th>",
                  escaped_for_markup(trace));
  for (const CostColumn& column : cost_columns()) page += fmt::format("<th>{}</th>", column.name);
  page += "</tr>\n";
  std::string reasons;
  const UpgradeStage* before = nullptr;
  for (const UpgradeStage& stage : stages) {
    page += row_of(stage, before);
    if (!stage.refused.empty()) continue;
    if (before != nullptr && stage.costs != before->costs) reasons += reasons_of(stage, *before);
    before = &stage;
  }
  return page + "</table>\n" + reasons + "</body>\n</html>\n";
}

}  // namespace lockstep
