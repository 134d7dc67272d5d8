#include "cuda_backend/simt/watch/source_place.h"

#include <fmt/format.h>

#if SIMT_HAVE_LIBBACKTRACE
#include <backtrace.h>
#endif

namespace simt {

#if SIMT_HAVE_LIBBACKTRACE

namespace {

void ignore_error(void*, const char*, int) {}

int keep_first(void* out, std::uintptr_t, const char* file, int line, const char*) {
  auto& place = *static_cast<std::string*>(out);
  if (file == nullptr) return 0;
  place = fmt::format("{}:{}", file, line);
  return 1;  // the innermost frame comes first
}

}  // namespace

std::string source_place(std::uintptr_t pc) {
  // Reading the debug information is dear; libbacktrace wants one state for the whole process.
  static backtrace_state* const state =
      backtrace_create_state(nullptr, /*threaded=*/1, ignore_error, nullptr);
  std::string place;
  if (state != nullptr && pc != 0)
    backtrace_pcinfo(state, pc - 1, keep_first, ignore_error, &place);
  return place;
}

#else

std::string source_place(std::uintptr_t) { return {}; }

#endif

}  // namespace simt
