// The reports that the host has yet to take, and the limits on how many are kept (report.h, rule
// 2).
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "cuda_backend/simt/watch/report.h"

namespace simt {

class ReportLog {
 public:
  void begin_launch(LaunchStatistics* statistics) {
    statistics_ = statistics;
    kept_ = 0;
    kept_by_place_.clear();
  }
  // Counts a report; true when there is room to keep it.
  bool admit(ReportKind kind, std::uintptr_t pc) {
    ++statistics_->reports[static_cast<std::size_t>(kind)];
    if (kept_ >= kReportsPerLaunch) return false;
    std::size_t& kept_here = kept_by_place_[{kind, pc}];
    if (kept_here >= kReportsPerPlace) return false;
    ++kept_here;
    ++kept_;
    return true;
  }
  void add(Report report) { reports_.push_back(std::move(report)); }
  const std::vector<Report>& reports() const { return reports_; }
  std::vector<Report> take() { return std::exchange(reports_, {}); }

 private:
  std::vector<Report> reports_;
  LaunchStatistics* statistics_ = nullptr;
  std::size_t kept_ = 0;
  std::map<std::pair<ReportKind, std::uintptr_t>, std::size_t> kept_by_place_;
};

}  // namespace simt
