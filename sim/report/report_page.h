// The text of report_page.html, with %DATA% where the run's JSON goes.
#pragma once

#include <string_view>

namespace lockstep {

std::string_view report_page();

}  // namespace lockstep
