// Why this is native: a signal handler may raise between any two bytecodes of Python code, and would leave the gate's
// counts half changed. No bytecode runs here. Signal handlers run only while a thread waits; if one raises, the wait is
// undone.
//
// Every method needs the GIL. The mutex may be taken with the GIL, because no thread takes the GIL while it holds the
// mutex.
#include "python/step_gate.h"

#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "codec/gil.h"
#include "python/signal_check.h"

namespace nb = nanobind;

namespace telegrad::python {
namespace {

using Clock = std::chrono::steady_clock;
using Context = std::int64_t;

constexpr auto kSignalCheck = std::chrono::milliseconds(50);  // between two checks while the main thread waits

/// Handler that is inside the gate, or a step that waits.
struct Reader {
  Context context;
  unsigned long thread;

  bool operator==(const Reader&) const = default;
};

template <class T>
void remove_one(std::vector<T>& from, const T& value) {
  const auto found = std::find(from.begin(), from.end(), value);
  *found = from.back();
  from.pop_back();
}

bool is_among(const std::vector<Reader>& readers, Context context) {
  return std::any_of(readers.begin(), readers.end(), [&](const Reader& reader) { return reader.context == context; });
}

/// Reports whether an id is that of a call chain outside of contexts.
bool is_chain(Context context) { return context < 0; }

class StepGate {
 public:
  StepGate(nb::object push_hooks, nb::object pop_hooks, double max_wait)
      : max_wait(max_wait), push_hooks_(std::move(push_hooks)), pop_hooks_(std::move(pop_hooks)) {}

  double max_wait;  // seconds that a step waits for handlers

  // ---- handlers

  Reader enter(Context context) {
    const Reader reader{context, PyThread_get_thread_ident()};
    std::unique_lock lock(state_->mutex);
    if (state_->stepping || !state_->waiting.empty()) {
      const std::uint64_t steps = state_->steps;
      const Queued queued(*state_);  // undone with the lock held, by a signal too
      wait(lock, [&] { return !state_->stepping && may_enter(context, steps); }, std::nullopt);
    }
    state_->readers.push_back(reader);
    return reader;
  }

  void leave(const Reader& reader) {
    const std::lock_guard lock(state_->mutex);
    remove_one(state_->readers, reader);
    if (!state_->waiting.empty()) state_->changed.notify_all();
  }

  // ---- bodies of contexts

  Reader open_body(Context context) {
    std::unique_lock lock(state_->mutex);
    wait(lock, [&] { return !state_->stepping; }, std::nullopt);
    state_->bodies.push_back(context);
    return {context, 0};  // a coroutine may leave it in another thread
  }

  void close_body(const Reader& reader) {
    const std::lock_guard lock(state_->mutex);
    remove_one(state_->bodies, reader.context);
  }

  // ---- steps

  struct StepLock {
    std::size_t overtaken;  // number of handlers of other contexts that are inside
    bool unread;            // no handler and no body of another context is inside
  };

  StepLock begin_step(Context context) {
    const unsigned long thread = PyThread_get_thread_ident();
    std::unique_lock lock(state_->mutex);
    const Waiting waiting(*state_, {context, thread});
    std::size_t others = 0;
    const auto alone = [&] {
      others = count_others(context, thread);
      return others == 0;
    };
    const auto limit = std::chrono::duration<double>(max_wait);
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
    const auto step_may_begin = [&] { return !state_->stepping && state_->due == 0; };
    wait(lock, [&] { return step_may_begin() && (alone() || Clock::now() >= deadline); }, deadline);
    state_->stepping = true;
    const bool no_body =
        std::all_of(state_->bodies.begin(), state_->bodies.end(), [&](Context body) { return body == context; });
    return {others, others == 0 && no_body};
  }

  void end_step() {
    const std::lock_guard lock(state_->mutex);
    state_->stepping = false;
    ++state_->steps;
    state_->due = state_->queued;
    state_->changed.notify_all();
  }

  // ---- waits for other steps, outside of the gate

  Reader begin_wait(Context context) {
    const Reader waiter{context, PyThread_get_thread_ident()};
    const std::lock_guard lock(state_->mutex);
    state_->blocked.push_back(waiter);
    if (!state_->waiting.empty()) state_->changed.notify_all();
    return waiter;
  }

  void end_wait(const Reader& waiter) {
    const std::lock_guard lock(state_->mutex);
    remove_one(state_->blocked, waiter);
  }

  // ---- saved-tensor hooks

  void push_hooks(nb::handle hooks) const {
    if (!hooks.is_none()) push_hooks_(hooks[0], hooks[1]);
  }
  void pop_hooks(nb::handle hooks) const {
    if (!hooks.is_none()) pop_hooks_();
  }

  // ---- counts, for tests and diagnostics

  std::size_t readers() const {
    const std::lock_guard lock(state_->mutex);
    return state_->readers.size();
  }
  std::size_t bodies() const {
    const std::lock_guard lock(state_->mutex);
    return state_->bodies.size();
  }
  std::size_t queued() const {
    const std::lock_guard lock(state_->mutex);
    return state_->queued;
  }
  std::vector<Context> waiting() const {
    const std::lock_guard lock(state_->mutex);
    std::vector<Context> contexts;
    for (const Reader& step : state_->waiting) contexts.push_back(step.context);
    return contexts;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Reader> readers;
    std::vector<Context> bodies;
    std::vector<Reader> waiting;  // contexts and threads of steps that wait
    std::vector<Reader> blocked;  // that wait for other steps, outside of the gate
    bool stepping = false;
    std::uint64_t steps = 0;
    std::size_t queued = 0;  // handlers that wait
    std::size_t due = 0;     // handlers that have waited during a step; the next step waits for them
  };

  /// Leaks the state in a forked child: its condition variable would wait for threads of the parent.
  struct DeleteState {
    pid_t owner = ::getpid();
    void operator()(State* state) const {
      if (::getpid() == owner) delete state;
    }
  };

  /// Counts a waiting handler for its scope. Created and destroyed with the mutex held.
  class Queued {
   public:
    explicit Queued(State& state) : state_(state), steps_(state.steps) { ++state_.queued; }
    ~Queued() {
      --state_.queued;
      if (state_.steps == steps_) return;
      --state_.due;
      state_.changed.notify_all();
    }
    Queued(const Queued&) = delete;
    Queued& operator=(const Queued&) = delete;

   private:
    State& state_;
    const std::uint64_t steps_;
  };

  /// Registers a waiting step for its scope. Created and destroyed with the mutex held.
  class Waiting {
   public:
    Waiting(State& state, const Reader& step) : state_(state), step_(step) {
      if (!state_.waiting.empty())
        state_.changed.notify_all();  // they do not wait for the handler that makes this step
      state_.waiting.push_back(step_);
    }
    ~Waiting() {
      remove_one(state_.waiting, step_);
      state_.changed.notify_all();
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    State& state_;
    const Reader step_;
  };

  bool may_enter(Context context, std::uint64_t steps) const {
    if (state_->waiting.empty() || state_->steps != steps) return true;
    return is_among(state_->waiting, context) || is_among(state_->readers, context);
  }

  /// Returns the number of handlers that a step has to wait for.
  std::size_t count_others(Context context, unsigned long thread) const {
    return std::count_if(state_->readers.begin(), state_->readers.end(), [&](const Reader& reader) {
      return reader.context != context && reader.thread != thread && !waits_for_step(reader);
    });
  }

  /// Reports whether a handler itself waits for a step, so that the two would wait for each other.
  bool waits_for_step(const Reader& handler) const {
    const auto is_its = [&](const Reader& step) {
      return step.thread == handler.thread || (is_chain(handler.context) && step.context == handler.context);
    };
    return std::any_of(state_->waiting.begin(), state_->waiting.end(), is_its) ||
           std::any_of(state_->blocked.begin(), state_->blocked.end(), is_its);
  }

  /// Waits until `ready`, which is checked again at the deadline. Holds the mutex at the end in every case.
  /// Throws nb::python_error: a signal handler has raised.
  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, Ready ready, std::optional<Clock::time_point> deadline) {
    if (ready()) return;
    lock.unlock();
    const bool takes_signals = PyThread_get_thread_ident() == main_thread();  // may switch threads
    while (true) {
      {
        const GilReleased released;
        lock.lock();
        if (!ready()) block(lock, takes_signals, deadline);
        lock.unlock();
      }
      const bool raised = takes_signals && PyErr_CheckSignals() != 0;
      lock.lock();
      if (raised) throw nb::python_error();
      if (ready()) return;
      lock.unlock();
    }
  }

  void block(std::unique_lock<std::mutex>& lock, bool takes_signals, std::optional<Clock::time_point> deadline) {
    const auto now = Clock::now();
    if (deadline && *deadline <= now) deadline.reset();  // another step holds the gate, for which there is no deadline
    if (takes_signals && (!deadline || now + kSignalCheck < *deadline)) deadline = now + kSignalCheck;
    if (deadline) {
      state_->changed.wait_until(lock, *deadline);
    } else {
      state_->changed.wait(lock);
    }
  }

  const nb::object push_hooks_;
  const nb::object pop_hooks_;
  const std::unique_ptr<State, DeleteState> state_{new State, DeleteState{}};
};

/// Base of the gate's context managers. Not reentrant.
class Guard {
 public:
  Guard(nb::object gate, Context context)
      : owner_(std::move(gate)), gate_(nb::cast<StepGate&>(owner_)), context_(context) {}

 protected:
  void check_free() const {
    if (entered_) throw std::runtime_error("this context manager of a StepGate is already entered");
  }

  const nb::object owner_;
  StepGate& gate_;
  const Context context_;
  bool entered_ = false;
};

/// Context manager for code that reads parameters; installs saved-tensor hooks.
template <Reader (StepGate::*Enter)(Context), void (StepGate::*Leave)(const Reader&)>
class ReaderGuard : public Guard {
 public:
  ReaderGuard(nb::object gate, Context context, nb::object hooks)
      : Guard(std::move(gate), context), hooks_(std::move(hooks)) {}

  void enter() {
    check_free();
    reader_ = (gate_.*Enter)(context_);
    try {
      gate_.push_hooks(hooks_);
    } catch (...) {
      (gate_.*Leave)(reader_);
      throw;
    }
    entered_ = true;
  }

  void exit(const nb::args&) {
    if (!std::exchange(entered_, false)) return;
    const Leaving leaving{*this};
    gate_.pop_hooks(hooks_);
  }

 private:
  struct Leaving {
    ReaderGuard& guard;
    ~Leaving() { (guard.gate_.*Leave)(guard.reader_); }
  };

  const nb::object hooks_;
  Reader reader_{};
};

/// Context manager for a wait for another step.
class WaitGuard : public Guard {
 public:
  using Guard::Guard;

  void enter() {
    check_free();
    waiter_ = gate_.begin_wait(context_);
    entered_ = true;
  }

  void exit(const nb::args&) {
    if (std::exchange(entered_, false)) gate_.end_wait(waiter_);
  }

 private:
  Reader waiter_{};
};

using HandlerGuard = ReaderGuard<&StepGate::enter, &StepGate::leave>;
using BodyGuard = ReaderGuard<&StepGate::open_body, &StepGate::close_body>;

class StepGuard : public Guard {
 public:
  using Guard::Guard;

  void enter() {
    check_free();
    lock_ = gate_.begin_step(context_);
    entered_ = true;
  }

  void exit(const nb::args&) {
    if (std::exchange(entered_, false)) gate_.end_step();
  }

  const StepGate::StepLock& lock() const { return lock_; }

 private:
  StepGate::StepLock lock_{};
};

constexpr const char* kExit = "def __exit__(self, *exception: object) -> None";

}  // namespace

void init_step_gate(nb::module_& m) {
  nb::class_<StepGate>(m, "StepGate", "Lock between steps of optimizers and handlers that read their parameters.")
      .def(nb::init<nb::object, nb::object, double>(), nb::arg("push_hooks"), nb::arg("pop_hooks"), nb::arg("max_wait"))
      .def(
          "handler",
          [](nb::object self, Context context, nb::object hooks) {
            return HandlerGuard(std::move(self), context, std::move(hooks));
          },
          nb::arg("context"), nb::arg("hooks") = nb::none())
      .def(
          "body",
          [](nb::object self, Context context, nb::object hooks) {
            return BodyGuard(std::move(self), context, std::move(hooks));
          },
          nb::arg("context"), nb::arg("hooks") = nb::none())
      .def(
          "step", [](nb::object self, Context context) { return StepGuard(std::move(self), context); },
          nb::arg("context"))
      .def(
          "blocked", [](nb::object self, Context context) { return WaitGuard(std::move(self), context); },
          nb::arg("context"), "Mark code that waits for another step: no step waits for its handler meanwhile.")
      .def_rw("max_wait", &StepGate::max_wait, "Limit in seconds of a step's wait for handlers.")
      .def_prop_ro("handlers", &StepGate::readers)
      .def_prop_ro("bodies", &StepGate::bodies)
      .def_prop_ro("queued", &StepGate::queued)
      .def_prop_ro("waiting", &StepGate::waiting);
  nb::class_<HandlerGuard>(m, "HandlerGuard")
      .def("__enter__", &HandlerGuard::enter)
      .def("__exit__", &HandlerGuard::exit, nb::sig(kExit));
  nb::class_<BodyGuard>(m, "BodyGuard")
      .def("__enter__", &BodyGuard::enter)
      .def("__exit__", &BodyGuard::exit, nb::sig(kExit));
  nb::class_<WaitGuard>(m, "WaitGuard")
      .def("__enter__", &WaitGuard::enter)
      .def("__exit__", &WaitGuard::exit, nb::sig(kExit));
  nb::class_<StepGuard>(m, "StepGuard")
      .def(
          "__enter__",
          [](nb::object self) {
            nb::cast<StepGuard&>(self).enter();
            return self;
          },
          nb::sig("def __enter__(self) -> StepGuard"))
      .def("__exit__", &StepGuard::exit, nb::sig(kExit))
      .def_prop_ro(
          "overtaken", [](const StepGuard& guard) { return guard.lock().overtaken; },
          "Number of handlers of other contexts that had not left when the step began.")
      .def_prop_ro(
          "unread", [](const StepGuard& guard) { return guard.lock().unread; },
          "Whether no handler or body of another context was inside when the step began.");
}

}  // namespace telegrad::python
