// No kernel file: an object that copies behind the checker's back, for the check of objects to
// refuse (cmake/lockstep_simt_objects.cmake).
#include <cstddef>
#include <cstring>

namespace lockstep {

int copy_unseen(int* target, const int* source, std::size_t count) {
  std::memcpy(target, source, count * sizeof(int));
  return *target;
}

}  // namespace lockstep
