// Tuning constants of the engine, with the reason for each value. Options of the program are in core/settings.h,
// constants of a transport next to its code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace telegrad {

// ---- leader: how long links may go unread

/// Longest time that links may go unread, or work unstarted, before another thread is woken. Ten times the cost of a
/// wake-up, which occupies a second processor.
inline constexpr Nanos kHandoffDelay = 500 * kMicrosecond;
/// This time if the last handlers returned before it ended.
inline constexpr Nanos kMaxHandoffDelay = 4 * kHandoffDelay;
/// Delay of the timer thread after the leader's own check of the clock. A thread that wakes while two others spin takes
/// a core from one of them.
inline constexpr Nanos kTimerSlack = 200 * kMicrosecond;
/// Longest sleep of a caller that checks for signals afterwards.
inline constexpr Nanos kSignalCheckInterval = kSecond;
/// Requests that a waiting caller reads before the pool polls: one may be the callback of the caller's own request.
inline constexpr int kRequestsBeforeHandoff = 2;

/// The timer thread reads the links if no thread has for this long, because user code has all threads. Far longer than
/// usual handlers take, so that it does not compete with them.
inline constexpr Nanos kUnreadTimeout = 100 * kMillisecond;
/// Longest time that it reads, before the timer is due again.
inline constexpr Nanos kTimerReads = 20 * kMillisecond;

// ---- leader: polling

/// Bytes read from one link before the others are read.
inline constexpr std::size_t kReadBudget = 1 << 20;
/// Polls of the last active link alone before all links are polled: a poll of all links is a system call.
inline constexpr std::uint32_t kLastActivePolls = 16;
/// Polls of busy-polled links alone before all links are polled: these polls only read memory.
inline constexpr std::uint32_t kMemoryPolls = 128;
/// Bytes of a tensor for which lanes may pay: a smaller one fits into the socket buffers.
inline constexpr std::size_t kLargeTensor = 1 << 20;

// ---- spinning: core/spin.h

/// Polls between two yields of the processor, which are system calls.
inline constexpr std::uint32_t kYieldEvery = 8;
/// This number if a poll only reads memory.
inline constexpr std::uint32_t kYieldEveryMemoryPolls = 64;
/// A yield that takes this long means that others have run meanwhile: they need the processor.
inline constexpr Nanos kCrowdedYield = 200 * kMicrosecond;
/// Spins in a row without an event, after which a thread sleeps at once: one or two may be chance.
inline constexpr int kMaxMissedSpins = 3;
/// Longest spin, in multiples of its budget: beyond it, a wake-up costs little of the wait.
inline constexpr int kMaxSpinStretch = 20;

// ---- work queue

/// Longest time that completions stay queued while a thread runs others, which holds the GIL.
inline constexpr Nanos kCompletionDelay = 20 * kMillisecond;
/// Longest time that deferred completions stay queued. They release a reference, which no thread waits for.
inline constexpr Nanos kDeferDelay = 4 * kHandoffDelay;
/// A pool thread that has been idle for this long exits.
inline constexpr Nanos kIdleThreadTimeout = 10 * kSecond;
/// Completions at the front of the queue among which a waiting caller searches for its own. A caller that waits for its
/// calls in the order in which they were made finds it there.
inline constexpr std::size_t kSearchDepth = 4;

// ---- calls

/// Longest time that a call outlasts its deadline while its callee says how far the request has come. The callee's
/// leader answers within kMaxHandoffDelay, even if all of its threads are busy.
inline constexpr Nanos kStateGrace = 20 * kMillisecond;

// ---- sender

/// Longest time that a coalesced message is kept back: about the time of one call.
inline constexpr Nanos kCoalesceDelay = 50 * kMicrosecond;
/// Longest pause between two messages of a burst: less than one call takes, so each does not wait for a reply.
inline constexpr Nanos kMaxBurstGap = 20 * kMicrosecond;
/// Messages in a row before a burst is coalesced: fewer end before it pays.
inline constexpr int kMinBurst = 16;
/// Messages of a burst that are sent together: beyond this, the cost of a system call per message is small.
inline constexpr std::size_t kMaxBatch = 16;
/// Longest time that the leader leaves a link to the threads that wait for it, between two parts of a large message.
inline constexpr Nanos kSenderTurn = 200 * kMicrosecond;
/// Parts of a large message, of about 1 MiB, that its sender sends before the leader sends the rest between polls of
/// other links. A part less than all costs a wake-up; this number takes a few milliseconds.
inline constexpr int kPartsInARow = 32;
/// Larger payloads are not copied under a lock, in bytes.
inline constexpr std::int64_t kLargePayload = 64 << 10;
/// No thread waits for a peer that has read nothing for this long.
inline constexpr Nanos kStallTimeout = 100 * kMillisecond;
/// Longest time that a continued session waits until the thread pool has verified what it sends again. The program may
/// hold the GIL for longer, and other calls wait too.
inline constexpr Nanos kVerifyLimit = kSecond;
/// Credit is reported in a frame of its own at this part of the window.
inline constexpr std::size_t kCreditShare = 4;
/// Requests of a peer that has not read its replies are held; this is how often its progress is checked. Half of the
/// default window in this time is 16 GB/s.
inline constexpr Nanos kReplyWindowCheck = 2 * kMillisecond;
/// A warning is logged when requests exceed the window by this factor.
inline constexpr std::int64_t kWindowWarningFactor = 4;

/// Payloads up to this size, in bytes, are copied so that they can be sent again after a broken connection. Larger
/// ones keep the memory of their tensors.
inline constexpr std::uint64_t kMaxCopied = 64 << 10;

// ---- overload: what a peer may do that does not keep the limits

/// Peers that keep the limits pass them by what was on its way: multiples of a limit,
inline constexpr std::int64_t kHardFactor = 2;
/// and by messages without content: more of them, and more bytes.
inline constexpr std::int64_t kHardRequests = 1024;
inline constexpr std::int64_t kHardBytes = 64 << 20;

// ---- peers

/// Pings in a row without an answer before a peer is lost: one may be delayed.
inline constexpr int kUnansweredPings = 2;
/// Reads of all links before that: the first may have begun before an answer arrived.
inline constexpr std::uint64_t kReadsBeforeLoss = 2;
/// Connections of a session that may break in a row before its oldest message has arrived: that message may break them.
inline constexpr int kMaxBrokenConnections = 20;
/// Pauses before the addresses of a peer are tried again: doubled each time, from the first to the second.
inline constexpr Nanos kMinRetryDelay = 5 * kMillisecond;
inline constexpr Nanos kMaxRetryDelay = 500 * kMillisecond;
/// Unauthenticated connections use at most this part of the descriptors, and as many stay free for the program.
inline constexpr std::size_t kUnauthenticatedShare = 8;
/// Part of them that one address may have.
inline constexpr std::size_t kSourceShare = 4;
/// Pause of a listener that cannot accept for lack of descriptors or memory.
inline constexpr Nanos kAcceptRetry = 100 * kMillisecond;
/// Accepts between two polls of existing connections.
inline constexpr int kAcceptsPerPoll = 16;
/// Interval in which at most kRejectLogLines rejected connections are logged.
inline constexpr Nanos kRejectLogInterval = 10 * kSecond;
inline constexpr std::size_t kRejectLogLines = 100;
/// Lanes may need at most this part of the descriptors.
inline constexpr std::size_t kLanesShare = 4;

// ---- memory

/// Cached memory that was not used for this time is released.
inline constexpr Nanos kTrimInterval = 10 * kSecond;
/// This time if the memory budget was too small since the last trim.
inline constexpr Nanos kShortTrimAge = kSecond;

}  // namespace telegrad
