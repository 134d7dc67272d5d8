// The names behind the numbers in stamps: every launch and host copy, in order.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cuda_backend/simt/watch/report.h"
#include "cuda_backend/simt/watch/stamp.h"

namespace simt {

class LaunchLog {
 public:
  // Numbers the next launch or host copy, from 1. Requires !full().
  std::uint32_t begin_launch(std::string_view kernel, uint3 grid);
  std::uint32_t begin_host(std::string_view operation);
  bool full() const { return entries_.size() >= kMaxLaunch; }
  // Numbers begin again at 2; 1 stands for everything so far. Returns the stamp of that.
  Stamp begin_again();

  // In that launch the tag, which is no linear index, belongs to this CTA (stamp.h, rule 2).
  void keep_tag(std::uint32_t launch, std::uint32_t tag, std::uint32_t cta_linear) {
    extra_tags_[(std::uint64_t{launch} << 32) | tag] = cta_linear;
  }

  // The number that reports show: it never begins again.
  std::uint64_t absolute(std::uint32_t launch) const { return forgotten_ + launch; }
  Party party_of(Stamp stamp) const;
  Party party_of(std::uint32_t launch, std::uint32_t cta_linear, unsigned thread,
                 unsigned epoch) const;

 private:
  struct Entry {
    std::uint32_t name;  // index into names_
    bool is_host;
    std::uint32_t grid_x, grid_y;
  };
  std::uint32_t name_index(std::string_view name);

  std::vector<Entry> entries_;  // number - 1
  std::vector<std::string> names_;
  std::unordered_map<std::string, std::uint32_t> name_indices_;
  std::uint32_t last_name_ = 0;
  std::map<std::uint64_t, std::uint32_t> extra_tags_;  // launch << 32 | tag to CTA
  std::uint64_t forgotten_ = 0;
};

}  // namespace simt
