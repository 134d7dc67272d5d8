// What a file compiled with -fsanitize=alignment calls before it uses a misaligned pointer. Checked
// kernel files are: of a struct that is stored member by member, the other hooks see members only.
//
// The sanitizer's own runtime, where the program is linked with it, still gets the calls of host
// code.
#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdint>

#include "cuda_backend/simt/executor_impl.h"

namespace {

// The layout that compilers emit.
struct TypeDescriptor {
  std::uint16_t kind;
  std::uint16_t info;
  char name[1];  // "'float2'", as long as it is
};
struct TypeMismatch {
  const char* file;
  std::uint32_t line;
  std::uint32_t column;
  const TypeDescriptor* type;
  std::uint8_t log2_alignment;
  std::uint8_t use;  // 0: a load, 1: a store, and others
};

using Handler = void (*)(TypeMismatch*, std::uintptr_t);

}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, std::uintptr_t address) {
  if (simt::runtime::running_checker == nullptr) {
    static const auto next =
        reinterpret_cast<Handler>(dlsym(RTLD_NEXT, "__ubsan_handle_type_mismatch_v1"));
    if (next != nullptr) next(data, address);
    return;
  }
  const std::size_t alignment = std::size_t{1} << data->log2_alignment;
  simt::runtime::running_checker->misaligned(
      address, alignment, data->use == 1 ? simt::AccessKind::write : simt::AccessKind::read,
      fmt::format("a {} wants a multiple of {}, at {}:{}", data->type->name, alignment, data->file,
                  data->line),
      reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)));
}
