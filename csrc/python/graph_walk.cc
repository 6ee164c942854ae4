// Depends on two attributes of torch's nodes: `next_functions`, a tuple of (node or None, number), and `variable` of
// the nodes of leaves. Most time goes to torch, which creates a Python object per node; with the loop in Python, a walk
// takes about twice as long.
#include "python/graph_walk.h"

#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "codec/gil.h"
#include "wire/constants.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace telegrad::python {
namespace {

constexpr int kInner = wire::NodeKind::kInner, kLeaf = wire::NodeKind::kLeaf;  // any other kind is a recv
constexpr std::int32_t kNone = -1;
constexpr int kFew = 8;  // nodes of a type up to which a lookup of its getter does not pay

/// Hash table from objects, to which it holds references, to their numbers.
class Numbers {
 public:
  Numbers() : entries_(64) {}
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  ~Numbers() {
    for (const Entry& e : entries_) Py_XDECREF(e.object);
  }

  /// Returns the number of an object, or kNone.
  std::int32_t find(PyObject* object) const { return entries_[slot_of(object)].number; }

  void add(PyObject* object, std::int32_t number) {
    Py_INCREF(object);
    entries_[slot_of(object)] = {object, number};
    if (++count_ * 2 > entries_.size()) grow();
  }

 private:
  struct Entry {
    PyObject* object = nullptr;
    std::int32_t number = kNone;
  };

  std::size_t slot_of(PyObject* object) const {
    const std::size_t mask = entries_.size() - 1;
    constexpr std::uint64_t kMix = 0x9E3779B97F4A7C15;
    std::size_t at = ((reinterpret_cast<std::uintptr_t>(object) >> 4) * kMix >> 32) & mask;
    while (entries_[at].object && entries_[at].object != object) at = (at + 1) & mask;
    return at;
  }

  void grow() {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    for (const Entry& e : old) {
      if (e.object) entries_[slot_of(e.object)] = e;
    }
  }

  std::vector<Entry> entries_;
  std::size_t count_ = 0;
};

class GraphWalk {
 public:
  GraphWalk(nb::dict kinds, nb::object guard_type)
      : kinds_(std::move(kinds)),
        guard_type_(std::move(guard_type)),
        checkpoint_(guard_type_.is_none() ? 0 : nb::cast<std::int64_t>(guard_type_.attr("first"))),
        next_(nb::steal(PyUnicode_InternFromString("next_functions"))),
        variable_(nb::steal(PyUnicode_InternFromString("variable"))) {}

  nb::tuple walk(const nb::object& edges) {
    Found found;
    const std::int32_t source = sources_++;
    std::vector<std::int32_t> stack;
    for (nb::handle edge : edges) {
      std::int32_t start = kNone;
      if (!edge.is_none()) {
        start = PyTuple_Check(edge.ptr()) ? number_of(item(edge)) : number_of_leaf(edge.ptr());
        visit(start, source, stack, found);
      }
      starts_.push_back(start);
    }
    starts_end_.push_back(starts_.size());
    while (!stack.empty()) {
      const std::int32_t here = stack.back();
      stack.pop_back();
      PyObject* const object = nodes_[here].object;
      const nb::tuple nexts = nexts_of(object);
      if (++visited_ == checkpoint_) {
        in_python([&] {
          if (guard_.is_none()) guard_ = guard_type_();
          checkpoint_ = nb::cast<std::int64_t>(guard_.attr("checkpoint")(nb::handle(object), nexts));
        });
      }
      nodes_[here].first = static_cast<std::int32_t>(targets_.size());
      for (nb::handle next : nexts) {
        PyObject* const there = item(next);
        targets_.push_back(there == Py_None ? kNone : number_of(there));
        if (there != Py_None) visit(targets_.back(), source, stack, found);
      }
      nodes_[here].last = static_cast<std::int32_t>(targets_.size());
    }
    return nb::make_tuple(found.leaves, found.recvs, found.shared);
  }

  bool sources_meet() const { return sources_meet_; }
  nb::object guard() const { return guard_; }

  nb::list nodes() const {
    nb::list nodes;
    for (const Node& node : nodes_) nodes.append(nb::handle(node.object));
    return nodes;
  }

  std::vector<int> kinds() const {
    std::vector<int> kinds;
    kinds.reserve(nodes_.size());
    for (const Node& node : nodes_) kinds.push_back(node.kind);
    return kinds;
  }

  std::vector<std::int32_t> starts(std::size_t source) const {
    return {starts_.begin() + (source ? starts_end_.at(source - 1) : 0), starts_.begin() + starts_end_.at(source)};
  }

  std::vector<std::int32_t> below(std::size_t number) const {
    const Node& node = nodes_.at(number);
    return {targets_.begin() + node.first, targets_.begin() + node.last};
  }

  /// Returns a topological order: depth-first, with a node placed before all nodes below it.
  std::vector<std::int32_t> order() const {
    std::vector<std::int32_t> order;
    std::vector<bool> entered(nodes_.size());
    std::vector<std::int32_t> stack;
    for (std::size_t at = starts_.size(); at-- > 0;) {
      if (starts_[at] != kNone) stack.push_back(starts_[at]);
    }
    while (!stack.empty()) {
      const std::int32_t here = stack.back();
      stack.pop_back();
      if (here < 0) {
        order.push_back(~here);
      } else if (!entered[here] && nodes_[here].kind == kInner) {
        entered[here] = true;
        stack.push_back(~here);
        for (std::int32_t at = nodes_[here].first; at < nodes_[here].last; ++at) {
          if (targets_[at] != kNone && !entered[targets_[at]]) stack.push_back(targets_[at]);
        }
      }
    }
    return {order.rbegin(), order.rend()};
  }

 private:
  struct Node {
    PyObject* object = nullptr;  // in `numbers_`; of a leaf its tensor
    int kind = kInner;
    std::int32_t source = kNone;  // the last source that led to it
    std::int32_t first = 0;       // of its edges in `targets_`
    std::int32_t last = 0;        // one past the last
  };

  struct Found {
    nb::list leaves, recvs, shared;
  };

  /// Cached facts about a node type. `get` is torch's C getter of `next_functions`; null if there is none, or while the
  /// type has few nodes.
  struct Type {
    PyTypeObject* type = nullptr;
    int kind = kInner;
    int asked = 0;  // how often edges of its nodes were read
    getter get = nullptr;
    void* closure = nullptr;
  };

  static PyObject* item(nb::handle edge) {
    PyObject* const node = PyTuple_GetItem(edge.ptr(), 0);
    if (!node) throw nb::python_error();
    return node;
  }

  std::int32_t number_of(PyObject* node) {
    std::int32_t number = numbers_.find(node);
    if (number == kNone) {
      const int kind = kind_of(node);
      if (kind == kLeaf) {
        const nb::object leaf = nb::steal(in_python([&] { return PyObject_GetAttr(node, variable_.ptr()); }));
        if (!leaf.is_valid()) throw nb::python_error();
        number = number_of_leaf(leaf.ptr());
        numbers_.add(node, number);
      } else {
        number = add(node, kind);
      }
    }
    return number;
  }

  std::int32_t number_of_leaf(PyObject* leaf) {
    const std::int32_t number = numbers_.find(leaf);
    return number == kNone ? add(leaf, kLeaf) : number;
  }

  std::int32_t add(PyObject* object, int kind) {
    const auto number = static_cast<std::int32_t>(nodes_.size());
    nodes_.push_back({object, kind});
    numbers_.add(object, number);
    return number;
  }

  void visit(std::int32_t number, std::int32_t source, std::vector<std::int32_t>& stack, Found& found) {
    Node& node = nodes_[number];
    if (node.source == source) return;
    const std::int32_t before = std::exchange(node.source, source);
    const nb::handle object(node.object);
    if (node.kind == kLeaf) {
      found.leaves.append(object);
      if (before != kNone) found.shared.append(nb::make_tuple(object, before));
    } else if (before != kNone) {
      sources_meet_ = true;
    } else if (node.kind == kInner) {
      stack.push_back(number);
    } else {
      found.recvs.append(object);
    }
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

  /// Returns the cached facts about a node's type. Found nodes are held, and they keep their types alive, so an address
  /// means one type during a walk.
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
      kind =
          nb::steal(in_python([&] { return PyObject_GetItem(kinds_.ptr(), key); }));  // __missing__ determines the kind
      if (!kind.is_valid()) throw nb::python_error();
    }
    return {type, nb::cast<int>(kind)};
  }

  void find_getter(Type& known) {
    const nb::object attribute = nb::steal(PyObject_GetAttr(reinterpret_cast<PyObject*>(known.type), next_.ptr()));
    if (!attribute.is_valid()) {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw nb::python_error();
      PyErr_Clear();  // each node's attribute is read instead
    } else if (Py_IS_TYPE(attribute.ptr(), &PyGetSetDescr_Type) &&
               PyType_IsSubtype(known.type, PyDescr_TYPE(attribute.ptr()))) {
      const PyGetSetDef* set = reinterpret_cast<PyGetSetDescrObject*>(attribute.ptr())->d_getset;
      known.get = set->get;
      known.closure = set->closure;
    }
  }

  nb::dict kinds_;
  nb::object guard_type_, guard_ = nb::none();
  std::int64_t checkpoint_;  // count of nodes at which `guard_.checkpoint` is called next
  nb::object next_, variable_;
  std::array<Type, 61> types_;
  Numbers numbers_;
  std::vector<Node> nodes_;            // by number
  std::vector<std::int32_t> targets_;  // numbers of nodes to which edges lead, or kNone; those of one node together
  std::vector<std::int32_t> starts_;   // numbers of nodes at which sources begin, or kNone
  std::vector<std::size_t> starts_end_;
  std::int32_t sources_ = 0;
  std::int64_t visited_ = 0;
  bool sources_meet_ = false;
};

}  // namespace

void init_graph_walk(nb::module_& m) {
  nb::class_<GraphWalk>(m, "GraphWalk", "Traversal of torch's autograd graph from several sources; keeps its nodes.")
      .def(nb::init<nb::dict, nb::object>(), "kinds"_a, "guard_type"_a.none() = nb::none(),
           "Create a walk without sources.\n\n"
           "`kinds` maps the type of a node to its kind: 0 for inner nodes, below which the walk continues, 1 for\n"
           "leaves, which several sources may share, 2 for other ends. `guard_type` is\n"
           "`telegrad.autograd.graph.deep_graph.RecursionGuard`.")
      .def("walk", &GraphWalk::walk, "edges"_a,
           "Walk from the next source.\n\n"
           "Each edge is a tuple that begins with a node, or a leaf's tensor, or None. Return the tensors of the "
           "leaves below it; the recv nodes below it that no earlier source reached; and\n"
           "(tensor, index of the last such source) for each leaf that an earlier source reached.")
      .def_prop_ro("sources_meet", &GraphWalk::sources_meet, "Whether two sources lead to a node that is no leaf.")
      .def_prop_ro("guard", &GraphWalk::guard, "Guard against deep recursion in a large graph, or None.")
      .def_prop_ro("nodes", &GraphWalk::nodes, "List of nodes by number, with the tensor instead of a leaf's node.")
      .def_prop_ro("kinds", &GraphWalk::kinds, "List of the nodes' kinds by number.")
      .def("starts", &GraphWalk::starts, "source"_a,
           "Return the numbers of the nodes of a source's edges; -1 for None.")
      .def("below", &GraphWalk::below, "number"_a,
           "Return the numbers of the nodes to which a node's edges lead; -1 for None.")
      .def("order", &GraphWalk::order,
           "Return the numbers of the nodes of kind 0, each before those that it leads to.");
}

}  // namespace telegrad::python
