// No kernel file: an inline function outside of namespace SIMT_VARIANT, of which the linker would
// keep one for both variants, for the check of objects to refuse
// (cmake/lockstep_simt_objects.cmake).
namespace lockstep {

using Function = int (*)(const int*);

inline int of_either_variant(const int* value) { return *value + 1; }
Function either_variant() { return of_either_variant; }

}  // namespace lockstep
