#include "properties/relations/device_relations.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "reference/memory/attention_oracle.h"

namespace lockstep {
namespace {

std::string name_of(const ReadPlace& at) {
  return fmt::format("tokens [{}, {}) of {} in layer {}", at.first, at.last, at.request, at.layer);
}

Breach breach_at(const ReadPlace& at, std::string what) {
  return {.request = at.request, .index = at.first, .what = std::move(what)};
}

using Outputs = std::span<const float>;

bool are_close(Outputs one, Outputs other, double tolerance) {
  return std::ranges::equal(one, other, [&](double a, double b) {
    return std::isfinite(a) && std::abs(a - b) <= tolerance;
  });
}

// Whether one number of [0, 1] makes `whole` of the two parts.
bool is_mean_of(Outputs whole, Outputs one, Outputs other, double tolerance) {
  double along = 0, length = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const double apart = double{one[i]} - other[i];
    along += (double{whole[i]} - other[i]) * apart;
    length += apart * apart;
  }
  const double weight = length == 0 ? 0 : std::clamp(along / length, 0.0, 1.0);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const double mean = weight * one[i] + (1 - weight) * other[i];
    if (!std::isfinite(whole[i]) || !(std::abs(whole[i] - mean) <= tolerance)) return false;
  }
  return true;
}

bool agree(const ReadPlace& at, const ReadOutputs& whole, const ReadOutputs& parts) {
  const double tolerance = 4 * attention_tolerance(whole.head_size, at.last - at.first);
  const std::vector<float>& all = whole.of_ranks.front();
  const std::vector<float>& first = parts.of_ranks.front();
  const std::vector<float>& last = parts.of_ranks.back();
  if (parts.of_ranks.size() == 1 || last.empty()) return are_close(all, first, tolerance);
  if (first.empty()) return are_close(all, last, tolerance);
  const auto head_size = static_cast<std::size_t>(whole.head_size);
  for (std::size_t begin = 0; begin < all.size(); begin += head_size)
    if (!is_mean_of(Outputs(all).subspan(begin, head_size),
                    Outputs(first).subspan(begin, head_size),
                    Outputs(last).subspan(begin, head_size), tolerance))
      return false;
  return true;
}

void compare_reads(const DeviceReading& one, const DeviceReading& other, DeviceCheck& check) {
  for (const DeviceReading* reading : {&one, &other})
    if (reading->unlike_itself && !check.breach)
      check.breach = breach_at(*reading->unlike_itself,
                               fmt::format("{} are read twice in one run, and not the same",
                                           name_of(*reading->unlike_itself)));
  for (const auto& [place, digest] : one.digests) {
    const auto same = other.digests.find(place);
    if (same == other.digests.end()) continue;
    ++check.compared;
    if (digest != same->second && !check.breach)
      check.breach = breach_at(
          place, fmt::format("{} are read as {:016x} in one run and as {:016x} in the other",
                             name_of(place), digest, same->second));
  }
  for (const auto& [place, outputs] : one.outputs) {
    const auto same = other.outputs.find(place);
    if (same == other.outputs.end()) continue;
    ++check.compared;
    if (!agree(place, outputs, same->second) && !check.breach)
      check.breach = breach_at(
          place, fmt::format("attention to {} comes to something else in the other run, or on its "
                             "ranks",
                             name_of(place)));
  }
}

void compare_pages(const DeviceReading& one, const DeviceReading& other, DeviceCheck& check) {
  const auto steps = std::min(one.pages.size(), other.pages.size());
  check.pages = static_cast<std::int64_t>(steps);
  const auto end = one.pages.begin() + check.pages;
  const auto parted = std::mismatch(one.pages.begin(), end, other.pages.begin()).first;
  if (parted == end || check.breach) return;
  const std::int64_t step = parted - one.pages.begin();
  check.breach = Breach{.request = "",
                        .index = step,
                        .what = fmt::format("pages hold something else after step {}", step)};
}

}  // namespace

Result<std::optional<DeviceCheck>> check_on_device(const SavedCase& saved, const Relation& relation,
                                                   const BackendFactory& make_backend) {
  const std::optional<SavedCase> other = relation.change(saved);
  if (!other || !why_not_read(*other).empty()) return std::optional<DeviceCheck>();
  const auto one = read_on_device(saved, make_backend, relation.moves_nothing);
  if (!one) return tl::unexpected(one.error());
  const auto two = read_on_device(*other, make_backend, relation.moves_nothing);
  DeviceCheck check;
  if (!two) {
    check.refused = two.error().message;
    return std::optional(check);
  }
  compare_reads(*one, *two, check);
  if (relation.moves_nothing) compare_pages(*one, *two, check);
  if (check.breach) check.breach->what += fmt::format(" ({}: {})", relation.name, relation.says);
  return std::optional(std::move(check));
}

}  // namespace lockstep
