#include "cuda_backend/simt/image.h"

#include <link.h>

#include <algorithm>

namespace simt {

bool Image::find(std::uintptr_t address, std::size_t bytes) const {
  return std::any_of(segments_.begin(), segments_.end(), [&](const Segment& segment) {
    return address >= segment.begin && address + bytes <= segment.end;
  });
}

bool Image::contains(std::uintptr_t address, std::size_t bytes) {
  if (find(address, bytes)) return true;
  segments_.clear();
  const auto collect = [](dl_phdr_info* object, std::size_t, void* out) {
    for (int i = 0; i < object->dlpi_phnum; ++i) {
      const auto& header = object->dlpi_phdr[i];
      if (header.p_type != PT_LOAD) continue;
      const std::uintptr_t begin = object->dlpi_addr + header.p_vaddr;
      static_cast<std::vector<Segment>*>(out)->push_back({begin, begin + header.p_memsz});
    }
    return 0;
  };
  dl_iterate_phdr(collect, &segments_);
  return find(address, bytes);
}

}  // namespace simt
