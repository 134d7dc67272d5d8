/* A plugin in C that does nothing, and one thing wrong: which, says a macro. */
#include <stdio.h>
#include <stdlib.h>

#include "cuda_backend/plugin/plugin.h"

struct lockstep_backend {
  int nothing;
};

static lockstep_backend* create(const lockstep_plan* plan, char* error, size_t error_bytes) {
#ifdef REFUSES_PLAN
  snprintf(error, error_bytes, "only %d layers fit", plan->num_layers - 1);
  return NULL;
#else
  (void)plan;
  (void)error;
  (void)error_bytes;
  return calloc(1, sizeof(lockstep_backend));
#endif
}
static void destroy(lockstep_backend* b) { free(b); }
static const char* error_text(lockstep_backend* b) {
  (void)b;
  return "the slots are on holiday";
}
static int write_bytes(lockstep_backend* b, int32_t tensor, int64_t offset, const void* bytes,
                       int64_t size_bytes) {
  return (void)b, (void)tensor, (void)offset, (void)bytes, (void)size_bytes, 0;
}
static int read_bytes(lockstep_backend* b, int32_t tensor, int64_t offset, void* bytes,
                      int64_t size_bytes) {
  return (void)b, (void)tensor, (void)offset, (void)bytes, (void)size_bytes, 0;
}
static int zero_blocks(lockstep_backend* b, int32_t group, const int32_t* block_ids,
                       int32_t count) {
  return (void)b, (void)group, (void)block_ids, (void)count, 0;
}
static int copy_blocks(lockstep_backend* b, int32_t group, const int32_t* sources,
                       const int32_t* targets, int32_t count) {
  return (void)b, (void)group, (void)sources, (void)targets, (void)count, 0;
}
static int update_tables(lockstep_backend* b, const int32_t* clear_rows, int32_t num_clear_rows,
                         const lockstep_table_update* updates, int32_t num_updates,
                         const lockstep_table_edit* edits, int32_t num_edits) {
  (void)clear_rows, (void)num_clear_rows, (void)updates, (void)num_updates;
  return (void)b, (void)edits, (void)num_edits, 0;
}
static int read_table(lockstep_backend* b, int32_t group, int32_t row, int32_t* block_ids,
                      int32_t* length) {
  return (void)b, (void)group, (void)row, (void)block_ids, *length = 0, 0;
}
static int map_slots(lockstep_backend* b, const int32_t* positions, const int32_t* rows,
                     int32_t num_tokens, int32_t num_padded_tokens, int64_t* slots) {
  (void)positions, (void)rows, (void)num_tokens, (void)num_padded_tokens;
  return (void)b, (void)slots, 1;
}
static int write_rows(lockstep_backend* b, int32_t layer, const void* keys, const void* values,
                      int32_t num_tokens) {
  return (void)b, (void)layer, (void)keys, (void)values, (void)num_tokens, 0;
}
static int read_rows(lockstep_backend* b, int32_t layer, int32_t row, int32_t first, int32_t last,
                     void* keys, void* values) {
  (void)layer, (void)row, (void)first, (void)last;
  return (void)b, (void)keys, (void)values, 0;
}
static int read_state(lockstep_backend* b, int32_t state, int32_t block_id, void* bytes) {
  return (void)b, (void)state, (void)block_id, (void)bytes, 0;
}
static int write_state(lockstep_backend* b, int32_t state, int32_t block_id, const void* bytes) {
  return (void)b, (void)state, (void)block_id, (void)bytes, 0;
}

#ifndef NO_ENTRY
const lockstep_plugin* lockstep_plugin_open(void) {
  static lockstep_plugin plugin;
  plugin.version = LOCKSTEP_PLUGIN_VERSION;
  plugin.struct_bytes = sizeof(plugin);
  plugin.name = "faulty";
  plugin.create = create;
  plugin.destroy = destroy;
  plugin.error_text = error_text;
  plugin.write_bytes = write_bytes;
  plugin.read_bytes = read_bytes;
  plugin.zero_blocks = zero_blocks;
  plugin.copy_blocks = copy_blocks;
  plugin.update_tables = update_tables;
  plugin.read_table = read_table;
  plugin.map_slots = map_slots;
  plugin.write_rows = write_rows;
  plugin.read_rows = read_rows;
#ifdef OLD_VERSION
  plugin.version = 0;
#endif
#ifdef OTHER_SIZE
  plugin.struct_bytes += 8;
#endif
#ifdef NO_WRITE_ROWS
  plugin.write_rows = NULL;
#endif
#if defined(HALF_OF_STATES) || defined(NO_COPY_OF_STATES)
  plugin.read_state = read_state;
#else
  (void)read_state;
#endif
#ifdef NO_COPY_OF_STATES
  plugin.write_state = write_state;
  plugin.copy_blocks = NULL;
#else
  (void)write_state;
#endif
#ifdef FAILS_SILENTLY
  plugin.error_text = NULL;
#endif
  return &plugin;
}
#else
void* faulty_plugin_functions[] = {create,      destroy,     error_text,    write_bytes, read_bytes,
                                   zero_blocks, copy_blocks, update_tables, read_table,  map_slots,
                                   write_rows,  read_rows,   read_state,    write_state};
#endif
