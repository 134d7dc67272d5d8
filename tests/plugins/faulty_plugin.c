/* A plugin with one fault each (a macro), for tests of refusals and of failing functions. */
#include <stdio.h>

#include "cuda_backend/plugin/plugin.h"

static int self_of_run;

static void* open_run(const lockstep_layer* layers, int32_t num_layers, char* error,
                      size_t error_bytes) {
  (void)layers;
#ifdef REFUSES_LAYERS
  snprintf(error, error_bytes, "only 1 of %d layers fits", num_layers);
  return NULL;
#else
  (void)num_layers, (void)error, (void)error_bytes;
  return &self_of_run;
#endif
}
static const char* error_text(void* self) {
  return self == &self_of_run ? "the rows are on holiday" : "another run's";
}
static int write_nothing(void* self, const lockstep_call* call) {
  (void)call;
#if defined(FAILS_LATER) || defined(FAILS_SILENTLY)
  return self == &self_of_run ? 7 : 1;
#else
  return self != &self_of_run;
#endif
}

#ifdef CHANGES_TABLE
static int change_table(void* self, const lockstep_call* call) {
  ((int32_t*)call->block_table.data)[0] += 1;
  return self != &self_of_run;
}
#endif

#ifdef DECLINES_SILENTLY
static const char* decline_all(void* self, const lockstep_layer* layer) {
  (void)self, (void)layer;
  return "";
}
#endif

#ifndef NO_ENTRY
const lockstep_plugin* lockstep_plugin_open(void) {
  static lockstep_plugin plugin;
  plugin.version = LOCKSTEP_PLUGIN_VERSION;
  plugin.struct_bytes = sizeof(plugin);
  plugin.name = "faulty";
  plugin.open = open_run;
  plugin.error_text = error_text;
  plugin.write = write_nothing;
#ifdef OLD_VERSION
  plugin.version = 1;
#endif
#ifdef OTHER_SIZE
  plugin.struct_bytes += 8;
#endif
#ifdef NO_FUNCTION
  plugin.write = NULL;
#endif
#ifdef WRONG_QUERIES
  plugin.query_dtype = "int8";
#endif
#ifdef DECLINES_SILENTLY
  plugin.declines = decline_all;
#endif
#ifdef CHANGES_TABLE
  plugin.write = NULL;
  plugin.attend = change_table;
#endif
#ifdef ON_GPU
  plugin.on_gpu = 1;
#endif
#ifdef FAILS_SILENTLY
  plugin.error_text = NULL;
#endif
  return &plugin;
}
#else
void* faulty_plugin_functions[] = {open_run, error_text, write_nothing};
#endif
