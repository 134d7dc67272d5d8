// The constants and globals of the program, which kernels may read: tables, literals, kernel
// arguments that the compiler made static.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace simt {

class Image {
 public:
  // In a loaded segment of the program or of a shared library. Libraries loaded since the last
  // question are found as well.
  bool contains(std::uintptr_t address, std::size_t bytes);

 private:
  struct Segment {
    std::uintptr_t begin;
    std::uintptr_t end;
  };
  bool find(std::uintptr_t address, std::size_t bytes) const;
  std::vector<Segment> segments_;
};

}  // namespace simt
