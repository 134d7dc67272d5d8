// A plugin of C++ whose function throws or exits, for tests that the run reports it.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cuda_backend/plugin/plugin.h"

namespace {

int write(void*, const lockstep_call* call) {
#if THROWS_A_NUMBER
  throw call->group;
#elif EXITS
  (void)call, std::exit(0);
#else
  throw std::out_of_range("row " + std::to_string(call->key.shape[0]));
#endif
}

}  // namespace

extern "C" const lockstep_plugin* lockstep_plugin_open() {
#if THROWS_IN_OPEN
  throw std::runtime_error("no device");
#endif
  static lockstep_plugin plugin;
  plugin.version = LOCKSTEP_PLUGIN_VERSION;
  plugin.struct_bytes = sizeof(plugin);
  plugin.name = "throwing";
  plugin.write = write;
  return &plugin;
}
