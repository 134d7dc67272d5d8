// The reason behind each check: what must hold, and what goes wrong otherwise. reason_of_check()
// shows it with a failure, to readers new to the checks.
#include <algorithm>
#include <array>

#include "properties/judge/known_findings.h"

namespace lockstep {
namespace {

// `check`: as in Outcome::check, without a number or a name of a request.
struct Reason {
  std::string_view check;
  std::string_view text;
};

constexpr std::array kReasons = std::to_array<Reason>({
    {"decide",
     "A decision must be executable: every scheduled token needs a slot in a block of its request, "
     "in every group, and what it reads must have been computed."},
    {"reuse",
     "A block that is allocated again must still hold its last owner's content; otherwise another "
     "request or kernel wrote to it."},
    {"memory_check",
     "A kernel may access only its own memory, and no two threads may race for a byte."},
    {"block_table",
     "The device's block table must name the blocks that the scheduler allocated: attention and "
     "writes find their slots through it."},
    {"slot_mapping",
     "A token's slot is block_id * block_size + offset; a wrong slot puts its keys and values into "
     "another token's slot, or nowhere."},
    {"page_written",
     "After a step every page that it wrote must hold, byte by byte, the rows of exactly the "
     "tokens that were scheduled; later tokens will read them."},
    {"host_block",
     "A host block must hold, byte by byte, the block that was stored there last; later requests "
     "load it."},
    {"transfer",
     "What a connector loads into a request's blocks, or stores of them, must be the rows of that "
     "request's own tokens, and the blocks must still be its own."},
    {"attention_digest",
     "Attention must read exactly the rows of the request's own tokens through the block table."},
    {"attention_output",
     "The output of attention over the right rows follows from them; a wrong one gives a wrong "
     "answer, silently."},
    {"state_output",
     "The output of a convolution or recurrence follows from the state that it read and the step's "
     "tokens; another state gives a wrong answer, silently."},
    {"extraction",
     "Hidden states that are read from the cache must be exactly those of the request's own "
     "tokens."},
    {"hidden_file",
     "A trainer that can see the file of a request's hidden states must find all of them in it, "
     "whenever it looks."},
    {"page_untouched",
     "A page that no step wrote must not change: whatever changed it wrote out of bounds."},
    {"collective",
     "All ranks of a collective must call it, with one shape; otherwise they deadlock or exchange "
     "wrong data."},
    {"ranks_together",
     "All ranks together must hold every row of the whole model, each as often as the others."},
    {"device",
     "A device that fails during a run received a request that it does not support: memory that "
     "does not exist, or a launch that it refuses."},
    {"engine.exception",
     "An engine that serves must not raise: every request that it holds goes down with it."},
    {"engine.check",
     "A scheduler must not contradict its own state: a block that it frees has a holder, and a "
     "request that it retires is live."},
    {"engine.crash",
     "An engine that serves must not end: every request that it holds goes down with it."},
    {"engine.hang", "A step must be decided: until then no request is served."},
    {"engine.reply",
     "A decision names live requests, blocks of the pool and counts that are not negative; a "
     "worker cannot execute any other."},
    {"page_final", "After the last step every page of the pool must hold what the model computes."},
    {"liveness",
     "An accepted request must end: with no running request and no further arrival, waiting "
     "requests wait forever."},
    {"liveness.head_of_line",
     "A request that has loaded its blocks must be able to continue: queued after a request that "
     "waits for these very blocks, both deadlock."},
    {"liveness.partial_load",
     "Partly loaded requests must not each need what the others hold: none of them can continue, "
     "and none frees a block."},
    {"audit.attention_read",
     "Attention may read only slots that hold exactly this request's prefix up to that token; "
     "anything else is another request's keys and values, or garbage."},
    {"audit.state_read",
     "A state stands for one prefix at one token count; a step that starts from any other state "
     "computes nonsense from there on."},
    {"audit.handed_out", "A block may be allocated only when no live request can still read it."},
    {"audit.token_write",
     "A step may write only to blocks that are its request's alone, inside its table, and never to "
     "the null block."},
    {"audit.scheduled_tokens",
     "Only live requests may be scheduled, and only tokens that are known or drafted."},
    {"audit.computed_again",
     "A running request continues after its last computed token. A request that computes the same "
     "tokens again in every step never ends, and takes new blocks until the pool is empty."},
    {"audit.excess_blocks",
     "A request holds as many blocks as its tokens and its drafts need. Every block beyond that is "
     "missing elsewhere."},
    {"audit.limits",
     "A worker allocates its buffers for the largest step that the configuration allows: tokens, "
     "requests, adapters, rows of the encoder."},
    {"audit.conservation",
     "Blocks held and blocks free must add up to the pool; a lost block never comes back."},
    {"audit.common_prefix",
     "Blocks reported as common to the batch are read once for all of it, so every table must "
     "contain them."},
    {"audit.transfer", "Only a load or a send in flight can complete."},
    {"audit.standstill",
     "Requests in a cycle of waiting deadlock: held blocks must become free without the blocks "
     "that their holders wait for."},
    {"audit.draft_read",
     "An EAGLE row of a token is also made of the next token, so a hit without a recomputed block "
     "must agree in that token."},
    {"audit.zeroing",
     "A block of attention that follows a state must be zeroed: the state's bytes may be NaN, and "
     "masked rows still spoil the sum."},
    {"audit.sampled",
     "A token follows the last known one, and a request has at most as many as allowed: anything "
     "else is a wrong answer."},
    {"audit.queues",
     "A live request must be in one queue: from none it never runs again, and from two it runs "
     "twice. The worker drops the row of a request when its end is reported, once."},
    {"audit.starts",
     "A worker gets all blocks of a request that is new or resumed, and only the added ones of one "
     "that runs: it fails, or appends to another table, if the row says otherwise."},
    {"audit.planned_blocks",
     "A pool planned for a number of states per request has no more: another request's are "
     "missing, or its own."},
    {"audit.draft_slots",
     "A draft model writes a row for each draft after the step's tokens, and needs a slot for it."},
    {"audit.cache_events",
     "Routers see a prefix cache only through its events: what they rebuild from them must be what "
     "requests hit."},
    {"audit.hits", "Cached content that the policy allows is hit; otherwise it is computed again."},
    {"audit.forbidden_hit",
     "After a reset, content from before it is wrong: the weights may have changed. A request that "
     "does not read the prefix cache computes all of its tokens."},
    {"audit.drafts",
     "A draft is verified after the tokens that it was proposed for, and dropped with them; "
     "otherwise the sampler accepts a token that was not proposed there."},
    {"audit.stale_output",
     "A step's output counts only for a request that still has what the step computed: otherwise a "
     "client receives a token that is sampled again, or loses one."},
    {"audit.inputs",
     "A request's inputs limit when it runs: its adapter fits into the step, its image's rows "
     "exist before attention reads them, its grammar is compiled."},
    {"audit.victim",
     "Under policy `priority` the least important request gives way: otherwise a client waits for "
     "another that pays less."},
    {"audit.worker_batch",
     "A worker must run the scheduled requests, each from its current position."},
    {"audit.worker_table",
     "A worker's block table must name the blocks that it received: attention and writes find "
     "their slots through it."},
    {"audit.worker_slot",
     "A token's slot is block_id * block_size + offset; a wrong one puts its keys and values into "
     "another token's slot, or nowhere."},
    {"audit.worker_page", "A step must change the slots of its tokens, and nothing else."},
    {"audit.worker_zeroing",
     "A block that is to be zeroed must hold zeros before anything of the step is read from it."},
    {"audit.recording", "A decision must be whole: known blocks, for every group."},
    {"invariant.conservation",
     "Held blocks, free blocks and the null block are the whole pool, each of them once."},
    {"invariant.ref_cnt",
     "A block's reference count is the number of table entries that name it: one too few frees it "
     "under a reader, one too many leaks it."},
    {"invariant.one_group", "A block belongs to one group at a time; its page is laid out for it."},
    {"invariant.null_block",
     "Block 0 stands for \"nothing kept here\": it is never free, cached or zeroed."},
    {"invariant.hash_to_block",
     "A cached block must be found by the hash that it is cached under."},
    {"invariant.one_writer",
     "A block that the step writes has one request that writes it, or two requests share a slot."},
    {"invariant.table_covers",
     "The table of a scheduled request must reach its last token in every group."},
    {"invariant.hit",
     "A prefix hit leaves at least one token to compute, and its blocks are cached."},
    {"invariant.published",
     "Only content that a request of this very step computes, or has computed, may become "
     "findable."},
    {"invariant.queue_front", "New blocks come from the front of the free queue."},
    {"invariant.limits",
     "A step keeps the engine's budgets, and schedules no request twice and no waiting request."},
    {"invariant.free_order",
     "Blocks of a request join the free queue tail first, so that its prefix is evicted last."},
    {"invariant.leak", "With no request left, every block is free again."},
    {"invariant.hit_row",
     "A prefix hit in HiSparse's host pool must be in the request's host blocks, row by row: it is "
     "read from there, or restored from there."},
    {"invariant.written_page",
     "A token is written to the page that workers have for it: without a page its row is lost."},
    {"invariant.read_page",
     "Every row that attention reads must be the last that was written for its token, on the "
     "device or, where workers have no page of it there, on the host."},
    {"invariant.hot_region",
     "Rows of the host are read through a request's hot region: it must exist, complete."},
    {"invariant.all_resident",
     "A step that reads rows of the host must not run as one that reads none."},
    {"invariant.clean_page",
     "A page counts as clean once its copy is complete: its device block may then be lost."},
    {"invariant.page_under_way",
     "A block must not be allocated while a copy of it is in flight: the copy reads or overwrites "
     "what the new holder writes."},
    {"invariant.page_leak",
     "With no request left, every block of HiSparse's host pool is free again."},
    {"hang", "A run must end."},
});

}  // namespace

std::string_view reason_of_check(std::string_view check) {
  // All fields of a decision share one reason, whatever the part after "conform.".
  if (check.starts_with("conform."))
    return "The engine must decide as the model of its release does: where it does not, one of "
           "them is wrong, or the release is another.";
  const auto found = std::ranges::find(kReasons, check, &Reason::check);
  return found == kReasons.end() ? std::string_view() : found->text;
}

}  // namespace lockstep
