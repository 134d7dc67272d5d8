// A shared library with a plugin in it (plugin.h): loaded, looked at, and closed at the end.
//
// Checked here: that it can be loaded, exports the entry, speaks this version, and has every
// function that is not optional. Not checked: anything that the functions do.
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "cuda_backend/plugin/plugin.h"

namespace lockstep::cuda {

class PluginLibrary {
 public:
  // Errors, each one sentence that begins with the path: no such file; not a shared library; no
  // lockstep_plugin_open; another version; a function that is missing.
  static Result<std::unique_ptr<PluginLibrary>> open(const std::string& path);
  ~PluginLibrary();
  PluginLibrary(const PluginLibrary&) = delete;
  PluginLibrary& operator=(const PluginLibrary&) = delete;

  const lockstep_plugin& plugin() const { return *plugin_; }

 private:
  explicit PluginLibrary(void* handle) : handle_(handle) {}

  void* handle_;
  const lockstep_plugin* plugin_ = nullptr;
};

}  // namespace lockstep::cuda
