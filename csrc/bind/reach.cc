// Knows of torch only that its nodes have `next_functions`, a tuple of (node or None, number). Most of a walk's time is
// torch's, which makes a Python object for each node; the same loop in Python takes as long again.
#include "bind/reach.h"

#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nanobind::literals;

namespace telegrad::bind {
namespace {

constexpr int kInner = 0, kLeaf = 1;  // as in telegrad.autograd.graph
constexpr std::int64_t kNobody = INT64_MIN;

/// Nodes that have been seen, each with the last source that led to it.
class Seen {
 public:
  Seen() : entries_(1024) {}
  Seen(const Seen&) = delete;
  Seen& operator=(const Seen&) = delete;
  ~Seen() {
    for (const Entry& e : entries_) Py_XDECREF(e.node);
  }

  /// Who led to it before, or nobody; now it is `source`.
  std::int64_t note(PyObject* node, std::int64_t source) {
    Entry& e = find(node);
    if (e.node) return std::exchange(e.source, source);
    Py_INCREF(node);
    e = {node, source};
    if (++count_ * 2 > entries_.size()) grow();
    return kNobody;
  }

 private:
  struct Entry {
    PyObject* node = nullptr;
    std::int64_t source = kNobody;
  };

  Entry& find(PyObject* node) {
    const std::size_t mask = entries_.size() - 1;
    constexpr std::uint64_t kMix = 0x9E3779B97F4A7C15;
    std::size_t at = (reinterpret_cast<std::uintptr_t>(node) >> 4) * kMix >> 32;
    while (entries_[at & mask].node && entries_[at & mask].node != node) ++at;
    return entries_[at & mask];
  }

  void grow() {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    for (const Entry& e : old) {
      if (e.node) find(e.node) = e;
    }
  }

  std::vector<Entry> entries_;
  std::size_t count_ = 0;
};

class Reach {
 public:
  Reach(nb::dict kinds, std::int64_t most)
      : kinds_(std::move(kinds)), most_(most), next_(nb::steal(PyUnicode_InternFromString("next_functions"))) {}

  std::optional<nb::list> walk(const nb::list& starts, std::int64_t source, const nb::object& descent) {
    nb::list ends;
    std::vector<PyObject*> stack;  // in `seen_`
    for (nb::handle start : starts) {
      if (!visit(start.ptr(), source, stack, ends)) return std::nullopt;
    }
    std::int64_t at = descent.is_none() ? 0 : nb::cast<std::int64_t>(descent.attr("at"));
    while (!stack.empty()) {
      if (++inner_ > most_) return std::nullopt;
      PyObject* here = stack.back();
      stack.pop_back();
      const nb::object nexts = nb::steal(PyObject_GetAttr(here, next_.ptr()));
      if (!nexts.is_valid()) throw nb::python_error();
      if (inner_ == at) {
        descent.attr("pass_by")(nb::handle(here), nexts);
        at = nb::cast<std::int64_t>(descent.attr("at"));
      }
      for (nb::handle next : nb::cast<nb::tuple>(nexts)) {
        PyObject* there = PyTuple_GetItem(next.ptr(), 0);
        if (!there) throw nb::python_error();
        if (there != Py_None && !visit(there, source, stack, ends)) return std::nullopt;
      }
    }
    return ends;
  }

  std::int64_t inner() const { return inner_; }

 private:
  /// False: another source has led to it, and it is no leaf.
  bool visit(PyObject* node, std::int64_t source, std::vector<PyObject*>& stack, nb::list& ends) {
    const std::int64_t before = seen_.note(node, source);
    if (before == source) return true;
    const int kind = kind_of(node);
    if (before != kNobody && kind != kLeaf) return false;
    if (kind == kInner) {
      stack.push_back(node);
    } else {
      ends.append(before == kNobody ? nb::make_tuple(nb::handle(node), nb::none())
                                    : nb::make_tuple(nb::handle(node), before));
    }
    return true;
  }

  int kind_of(PyObject* node) {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(node));
    nb::object kind = nb::borrow(PyDict_GetItemWithError(kinds_.ptr(), type));
    if (!kind.is_valid()) {
      if (PyErr_Occurred()) throw nb::python_error();
      kind = nb::steal(PyObject_GetItem(kinds_.ptr(), type));  // it finds out
      if (!kind.is_valid()) throw nb::python_error();
    }
    return nb::cast<int>(kind);
  }

  nb::dict kinds_;
  std::int64_t most_;
  nb::object next_;
  Seen seen_;
  std::int64_t inner_ = 0;
};

}  // namespace

void init_reach(nb::module_& m) {
  nb::class_<Reach>(m, "Reach", "What nodes of torch's graph lead to, from one source after the other.")
      .def(nb::init<nb::dict, std::int64_t>(), "kinds"_a, "most"_a = INT64_MAX,
           "`kinds` tells a node's kind by its type: 0 for those that the walk goes on from, 1 for leaves, which\n"
           "several sources may share, 2 for other ends. It walks past `most` of the first at most.")
      .def("walk", &Reach::walk, "starts"_a, "source"_a, "descent"_a.none() = nb::none(),
           "The ends that these nodes lead to, and that this source has not come to yet, each with the last source\n"
           "that has, or None. None in place of the list: another source leads to one of the nodes, or there are too "
           "many; this\n"
           "object is of no more use then.")
      .def_prop_ro("inner", &Reach::inner, "How many nodes that are no ends it has come to.");
}

}  // namespace telegrad::bind
