// Knows of torch only that its nodes have `next_functions`, a tuple of (node or None, number). Most of a walk's time is
// torch's, which makes a Python object for each node; the same loop in Python takes as long again.
#include "bind/reach.h"

#include <nanobind/stl/optional.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "codec/gil.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace telegrad::bind {
namespace {

constexpr int kInner = 0, kLeaf = 1, kOwn = 3;  // as in telegrad.autograd.graph
constexpr std::int64_t kNobody = INT64_MIN;
constexpr int kFew = 8;  // nodes of a type for which its getter is not worth a look

/// Nodes that have been seen, each with the last source that led to it.
class Seen {
 public:
  Seen() : entries_(64) {}
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
  explicit Reach(nb::dict kinds)
      : kinds_(std::move(kinds)), next_(nb::steal(PyUnicode_InternFromString("next_functions"))) {}

  std::optional<nb::list> walk(const nb::list& starts, std::int64_t source, const nb::object& descent) {
    nb::list ends;
    std::vector<PyObject*> stack;  // in `seen_`
    for (nb::handle start : starts) {
      if (!visit(start.ptr(), source, stack, ends)) return std::nullopt;
    }
    std::int64_t at = descent.is_none() ? 0 : nb::cast<std::int64_t>(descent.attr("at"));
    while (!stack.empty()) {
      ++inner_;
      PyObject* here = stack.back();
      stack.pop_back();
      const nb::tuple nexts = nexts_of(here);
      if (inner_ == at) {
        in_python([&] { descent.attr("pass_by")(nb::handle(here), nexts); });
        at = nb::cast<std::int64_t>(descent.attr("at"));
      }
      bool leads_on = false;
      for (nb::handle next : nexts) {
        PyObject* there = PyTuple_GetItem(next.ptr(), 0);
        if (!there) throw nb::python_error();
        if (there == Py_None) continue;
        leads_on = true;
        if (!visit(there, source, stack, ends)) return std::nullopt;
      }
      if (leads_on && kind_of(here) == kInner) ++plain_;
    }
    return ends;
  }

  std::int64_t inner() const { return inner_; }
  std::int64_t plain() const { return plain_; }

 private:
  /// What is known of the nodes of a type. `get` is torch's own function behind `next_functions`, if it is one, and
  /// this is the type of more than a few nodes.
  struct Type {
    PyTypeObject* type = nullptr;
    int kind = kInner;
    int asked = 0;  // how often, for what its nodes lead to
    getter get = nullptr;
    void* closure = nullptr;
  };

  /// False: another source has led to it, and it is no leaf.
  bool visit(PyObject* node, std::int64_t source, std::vector<PyObject*>& stack, nb::list& ends) {
    const std::int64_t before = seen_.note(node, source);
    if (before == source) return true;
    const int kind = kind_of(node);
    if (before != kNobody && kind != kLeaf) return false;
    if (kind == kInner || kind == kOwn) {
      stack.push_back(node);
    } else {
      ends.append(before == kNobody ? nb::make_tuple(nb::handle(node), nb::none())
                                    : nb::make_tuple(nb::handle(node), before));
    }
    return true;
  }

  int kind_of(PyObject* node) { return type_of(node).kind; }

  nb::tuple nexts_of(PyObject* node) {
    Type& type = type_of(node);
    if (++type.asked == kFew) find_getter(type);
    PyObject* nexts =
        in_python([&] { return type.get ? type.get(node, type.closure) : PyObject_GetAttr(node, next_.ptr()); });
    if (!nexts) throw nb::python_error();
    if (!PyTuple_Check(nexts)) {
      Py_DECREF(nexts);
      throw nb::type_error("next_functions is no tuple");
    }
    return nb::steal<nb::tuple>(nexts);
  }

  /// Types live as long as a node of theirs, and those are held: an address means the same type during a walk.
  Type& type_of(PyObject* node) {
    PyTypeObject* type = Py_TYPE(node);
    Type& known = types_[(reinterpret_cast<std::uintptr_t>(type) >> 4) % types_.size()];
    if (known.type != type) known = look_up(type);
    return known;
  }

  Type look_up(PyTypeObject* type) {
    auto* key = reinterpret_cast<PyObject*>(type);
    nb::object kind = nb::borrow(PyDict_GetItemWithError(kinds_.ptr(), key));
    if (!kind.is_valid()) {
      if (PyErr_Occurred()) throw nb::python_error();
      kind = nb::steal(in_python([&] { return PyObject_GetItem(kinds_.ptr(), key); }));  // it finds out
      if (!kind.is_valid()) throw nb::python_error();
    }
    return {type, nb::cast<int>(kind)};
  }

  void find_getter(Type& known) {
    const nb::object attribute = nb::steal(PyObject_GetAttr(reinterpret_cast<PyObject*>(known.type), next_.ptr()));
    if (!attribute.is_valid()) {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw nb::python_error();
      PyErr_Clear();  // nodes are asked one by one
    } else if (Py_IS_TYPE(attribute.ptr(), &PyGetSetDescr_Type) &&
               PyType_IsSubtype(known.type, PyDescr_TYPE(attribute.ptr()))) {
      const PyGetSetDef* set = reinterpret_cast<PyGetSetDescrObject*>(attribute.ptr())->d_getset;
      known.get = set->get;
      known.closure = set->closure;
    }
  }

  nb::dict kinds_;
  nb::object next_;
  std::array<Type, 61> types_;
  Seen seen_;
  std::int64_t inner_ = 0;
  std::int64_t plain_ = 0;
};

}  // namespace

void init_reach(nb::module_& m) {
  nb::class_<Reach>(m, "Reach", "What nodes of torch's graph lead to, from one source after the other.")
      .def(nb::init<nb::dict>(), "kinds"_a,
           "`kinds` tells a node's kind by its type: 0 for those that the walk goes on from, 3 for those of them that\n"
           "run code of the program, 1 for leaves, which several sources may share, 2 for other ends.")
      .def("walk", &Reach::walk, "starts"_a, "source"_a, "descent"_a.none() = nb::none(),
           "The ends that these nodes lead to, and that this source has not come to yet, each with the last source\n"
           "that has, or None. None in place of the list: another source leads to one of the nodes; this\n"
           "object is of no more use then.")
      .def_prop_ro("inner", &Reach::inner, "How many nodes that are no ends it has come to.")
      .def_prop_ro("plain", &Reach::plain, "How many of those have kind 0, and lead on.");
}

}  // namespace telegrad::bind
