// Python bindings of the donor codec's exact core. Arrays of a model must have the exact dtype and shape, otherwise a
// ValueError names the one that has not; they are copied. Coding releases the GIL.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/in_order.h"
#include "bindings/model.h"
#include "bindings/spans.h"
#include "donor/donor.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

const ArrayChecks kChecks("donor");

// The predictive codec's model with a reach of one layer, without bias and without a table of tokens.
struct Coder {
  std::unique_ptr<predict::Model> model;
  bool propagates;
};

std::shared_ptr<Coder> build(const py::array& shapes, const MaybeArray& freqs, const std::optional<Lists>& in_scale,
                             const std::optional<Lists>& out_scale, const std::optional<Lists>& fix,
                             const std::optional<Lists>& weight, const MaybeArray& rope_fine,
                             const MaybeArray& rope_coarse) {
  const auto list = [](const std::optional<Lists>& given) { return given ? &*given : nullptr; };
  ModelLists lists;
  lists.in_scale = list(in_scale);
  lists.out_scale = list(out_scale);
  lists.fix = list(fix);
  lists.weight = list(weight);
  predict::Arrays arrays;
  arrays.codec = "donor";
  arrays.reach = 1;
  arrays.layers = layers_of(kChecks, shapes);
  take_rope(kChecks, arrays, take_parts(kChecks, arrays, lists), rope_fine, rope_coarse);
  arrays.freqs = kChecks.needed<std::uint16_t>(freqs, "freqs", {2 * predict::kClasses, predict::kSymbols});
  return std::make_shared<Coder>(Coder{std::make_unique<predict::Model>(arrays), weight.has_value()});
}

struct Call : SpansCall {
  Call(const Coder& coder, std::int64_t start, std::size_t count, const py::array& table, const py::array& runs,
       const py::list& tables, const py::array& angles, bool propagated, const MaybeLevel& level)
      : SpansCall(kChecks, coder.model->parts(), start, count, table, runs, tables, angles, propagated, level) {
    const std::int64_t last = static_cast<std::int64_t>(count), positions = coder.model->positions();
    if (propagated && (!coder.propagates || start < 0 || last > positions || start > positions - last))
      kChecks.refuse("the model has no weights, or does not know the positions");
    if (!codable(*coder.model, donor::covered(block)))
      kChecks.refuse("a block has more values than can be coded at once");
  }
};

// The bytes of each layer; None if `out` is too short.
py::object encode(const Coder& coder, std::int64_t start, std::size_t count, const py::array& rows,
                  const py::array& spans, const py::list& donors, const py::array& angles, bool propagated,
                  const py::buffer& out, const MaybeLevel& level) {
  const Call call(coder, start, count, rows, spans, donors, angles, propagated, level);
  const Memory memory(out, true);
  std::vector<std::uint64_t> sizes(coder.model->parts().size() / 2);
  const bool fits = unlocked([&] {
    return donor::encode(*coder.model, call.block, memory.data(), memory.size(), sizes.data(), call.twin);
  });
  return sizes_if(fits, sizes);
}

// What is damaged, or None.
std::optional<std::string> decode(const Coder& coder, std::int64_t start, std::size_t count, const py::array& rows,
                                  const py::array& spans, const py::list& donors, const py::array& angles,
                                  bool propagated, const py::buffer& payload, const std::vector<std::uint64_t>& sizes,
                                  std::size_t wanted, const MaybeLevel& level) {
  const Call call(coder, start, count, rows, spans, donors, angles, propagated, level);
  check_layers(sizes, coder.model->parts().size() / 2);
  const Memory memory(payload, false);
  return damage("donor", unlocked([&] {
    return donor::decode(*coder.model, call.block, memory.data(), memory.size(), sizes.data(), wanted, call.twin);
  }));
}

std::unique_ptr<HeldInOrder> in_order(const std::shared_ptr<Coder>& coder, std::int64_t start, std::size_t count,
                                      const py::array& rows, const py::array& spans, const py::list& donors,
                                      const py::array& angles, bool propagated, const py::buffer& payload,
                                      const std::vector<std::uint64_t>& sizes, std::size_t wanted,
                                      const MaybeLevel& level) {
  const auto call =
      std::make_shared<const Call>(*coder, start, count, rows, spans, donors, angles, propagated, level);
  const auto begin = [&](const Call& of, const std::uint8_t* data, std::size_t nbytes, const std::uint64_t* layers) {
    return donor::in_order(*coder->model, of.block, data, nbytes, layers, wanted, of.twin);
  };
  return held<Coder, Call>("donor", coder->model->parts().size() / 2, coder, call, payload, sizes, begin);
}

}  // namespace

PYBIND11_MODULE(_donor, m) {
  m.doc() = "The donor codec's exact core; see csrc/donor/donor.h.";
  py::class_<Coder, std::shared_ptr<Coder>>(m, "Coder")
      .def(py::init(&build), py::kw_only(), py::arg("shapes"), py::arg("freqs"), py::arg("in_scale") = py::none(),
           py::arg("out_scale") = py::none(), py::arg("fix") = py::none(), py::arg("weight") = py::none(),
           py::arg("rope_fine") = py::none(), py::arg("rope_coarse") = py::none())
      .def_property_readonly("positions", [](const Coder& coder) { return coder.model->positions(); });
  m.def("encode", &encode, py::arg("coder"), py::arg("start"), py::arg("count"), py::arg("rows"), py::arg("spans"),
        py::arg("donors"), py::arg("angles"), py::arg("propagated"), py::arg("out"), py::arg("level") = py::none());
  m.def("decode", &decode, py::arg("coder"), py::arg("start"), py::arg("count"), py::arg("rows"), py::arg("spans"),
        py::arg("donors"), py::arg("angles"), py::arg("propagated"), py::arg("payload"), py::arg("sizes"),
        py::arg("wanted"), py::arg("level") = py::none());
  add_in_order(m);
  m.def("in_order", &in_order, py::arg("coder"), py::arg("start"), py::arg("count"), py::arg("rows"), py::arg("spans"),
        py::arg("donors"), py::arg("angles"), py::arg("propagated"), py::arg("payload"), py::arg("sizes"),
        py::arg("wanted"), py::arg("level") = py::none());
}
