// Python bindings of the copies between tensors and blocks, and of the codecs splitzip and entropy. Coding releases the
// GIL.
#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "entropy/entropy.h"
#include "splitzip/splitzip.h"
#include "xxh3/xxh3.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

// A copy of so few bytes keeps the GIL: it takes a tenth of a millisecond, and whoever gives the GIL away waits for it
// up to 5 ms (sys.getswitchinterval) where another thread computes in Python.
constexpr double kBriefBytes = 1 << 20;

template <class Work>
void copying(double nbytes, bool unlock, Work work) {
  if (nbytes <= kBriefBytes && !unlock)
    work();
  else
    unlocked(work);
}

// Bytes of all tensors.
double bytes_of(const Ints& heads, const Ints& row_bytes, std::size_t tokens) {
  double sum = 0;
  for (py::ssize_t i = 0; i < heads.size(); ++i)
    sum += static_cast<double>(heads.data()[i]) * row_bytes.data()[i] * static_cast<double>(tokens);
  return sum;
}

void copy_all(const std::vector<Rows>& to, const std::vector<Rows>& from, const Ints& heads, const Ints& row_bytes,
              std::size_t tokens, bool large, bool unlock) {
  copying(bytes_of(heads, row_bytes, tokens), unlock, [&] {
    kvstore::copy_rows(to.data(), from.data(), heads.data(), row_bytes.data(), to.size(), tokens, large);
  });
}

std::size_t tensors_of(const Ints& heads, const Ints& row_bytes) {
  if (row_bytes.size() != heads.size()) throw py::value_error("heads and row_bytes: expected the same length");
  return static_cast<std::size_t>(heads.size());
}

void copy(const Longs& target, const Longs& source, const Ints& heads, const Ints& row_bytes,
          std::size_t tokens, bool large, bool unlock) {
  const std::size_t count = tensors_of(heads, row_bytes);
  copy_all(rows_of(target, count), rows_of(source, count), heads, row_bytes, tokens, large, unlock);
}

// The rows of memory that holds the tensors one after the other, each [heads, tokens, row_bytes], and nothing else.
std::vector<Rows> packed_rows(const Memory& memory, const Ints& heads, const Ints& row_bytes, std::size_t tokens,
                              const char* name) {
  const std::size_t count = tensors_of(heads, row_bytes);
  std::vector<Rows> rows;
  rows.reserve(count);
  std::uint64_t left = memory.size();
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t row = row_bytes.data()[i], lines = heads.data()[i];
    const std::uint64_t address = reinterpret_cast<std::uint64_t>(memory.data()) + (memory.size() - left);
    if (row && lines && tokens > left / row / lines)
      throw py::value_error(std::string(name) + ": expected memory for all rows, found " +
                            std::to_string(memory.size()) + " bytes");
    left -= row * lines * tokens;
    const auto step = static_cast<std::int64_t>(row);
    rows.push_back({address, step * static_cast<std::int64_t>(tokens), step});
  }
  return rows;
}

void pack(const py::buffer& out, const Longs& source, const Ints& heads, const Ints& row_bytes, std::size_t tokens,
          bool unlock) {
  const Memory memory(out, true);
  const auto to = packed_rows(memory, heads, row_bytes, tokens, "out");
  copy_all(to, rows_of(source, to.size()), heads, row_bytes, tokens, false, unlock);
}

// One view that is packed, and where it goes.
struct Packing {
  Memory memory;
  std::vector<Rows> to, from;
  std::size_t tokens, nbytes = 0;
  std::optional<std::array<std::uint8_t, 16>> sum;

  Packing(const py::buffer& out, const Longs& source, const Ints& heads, const Ints& row_bytes, std::size_t count)
      : memory(out, true),
        to(packed_rows(memory, heads, row_bytes, count, "outs")),
        from(rows_of(source, to.size())),
        tokens(count) {
    for (py::ssize_t i = 0; i < heads.size(); ++i)
      nbytes += static_cast<std::size_t>(heads.data()[i]) * row_bytes.data()[i] * tokens;
  }
};

// The xxh3-128 of each; None of so few bytes that this hash of them is another.
py::list pack_all(const std::vector<py::buffer>& outs, const std::vector<Longs>& sources, const Ints& heads,
                  const Ints& row_bytes, const std::vector<std::size_t>& tokens, const MaybeLevel& cpu) {
  if (outs.size() != sources.size() || outs.size() != tokens.size())
    throw py::value_error("outs, sources and tokens: expected the same length");
  const Level twin = level_of(cpu);
  std::deque<Packing> all;
  for (std::size_t i = 0; i < outs.size(); ++i) all.emplace_back(outs[i], sources[i], heads, row_bytes, tokens[i]);
  unlocked([&] {
    for (Packing& one : all) {
      kvstore::copy_rows(one.to.data(), one.from.data(), heads.data(), row_bytes.data(), one.to.size(), one.tokens);
      if (one.nbytes >= kLeast128) one.sum = xxh3_128(one.memory.data(), one.nbytes, twin);
    }
  });
  py::list sums;
  for (const Packing& one : all)
    sums.append(one.sum ? py::object(py::bytes(reinterpret_cast<const char*>(one.sum->data()), one.sum->size()))
                        : py::object(py::none()));
  return sums;
}

void unpack(const Longs& target, const py::buffer& packed, const Ints& heads, const Ints& row_bytes,
            std::size_t tokens, std::size_t wanted, bool large, bool unlock) {
  const Memory memory(packed, false);
  const auto from = packed_rows(memory, heads, row_bytes, tokens, "packed");
  if (wanted > tokens) throw py::value_error("wanted: expected at most as many tokens as are packed");
  copy_all(rows_of(target, from.size()), from, heads, row_bytes, wanted, large, unlock);
}

// One piece of packed memory, and the rows where it goes.
struct Unpacking {
  Memory memory;
  std::vector<Rows> from, to;
  std::size_t wanted;

  Unpacking(const py::buffer& packed, std::vector<Rows> target, const Ints& heads, const Ints& row_bytes,
            std::size_t tokens, std::size_t at, std::size_t count)
      : memory(packed, false),
        from(packed_rows(memory, heads, row_bytes, tokens, "packed")),
        to(std::move(target)),
        wanted(count) {
    if (wanted > tokens) throw py::value_error("wanted: expected at most as many tokens as are packed");
    for (Rows& row : to) row.address += static_cast<std::uint64_t>(row.token_stride * static_cast<std::int64_t>(at));
  }
};

// capacity: tokens that the target has room for.
void unpack_all(const Longs& target, std::size_t capacity, const std::vector<py::buffer>& packed, const Ints& heads,
                const Ints& row_bytes, const std::vector<std::size_t>& tokens, const std::vector<std::size_t>& at,
                const std::vector<std::size_t>& wanted, bool large) {
  const std::size_t count = packed.size();
  if (tokens.size() != count || at.size() != count || wanted.size() != count)
    throw py::value_error("packed, tokens, at and wanted: expected the same length");
  const std::vector<Rows> rows = rows_of(target, tensors_of(heads, row_bytes));
  std::deque<Unpacking> all;
  double nbytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (at[i] > capacity || wanted[i] > capacity - at[i]) throw py::value_error("at: the target has no such rows");
    all.emplace_back(packed[i], rows, heads, row_bytes, tokens[i], at[i], wanted[i]);
    nbytes += bytes_of(heads, row_bytes, wanted[i]);
  }
  copying(nbytes, false, [&] {
    for (const Unpacking& one : all)
      kvstore::copy_rows(one.to.data(), one.from.data(), heads.data(), row_bytes.data(), rows.size(), one.wanted,
                         large);
  });
}

splitzip::Dtype dtype_of(const std::string& name) {
  if (name == "bfloat16") return splitzip::Dtype::bfloat16;
  if (name == "float16") return splitzip::Dtype::float16;
  if (name == "float32") return splitzip::Dtype::float32;
  if (name == "float8_e5m2") return splitzip::Dtype::float8_e5m2;
  if (name == "float8_e4m3fn") return splitzip::Dtype::float8_e4m3fn;
  throw py::value_error("splitzip: dtype '" + name + "' is unknown");
}

// The arguments of all three functions below, checked.
struct Call {
  splitzip::Shape shape;
  std::vector<std::uint64_t> bounds;

  Call(const std::string& dtype, const Ints& heads, const Ints& row_bytes, std::size_t tokens)
      : shape{dtype_of(dtype), static_cast<std::size_t>(heads.size()) / 2, heads.data(), row_bytes.data(), tokens} {
    if (heads.size() % 2 || row_bytes.size() != heads.size())
      throw py::value_error("heads and row_bytes: expected keys and values of every layer");
    // So that no sum of sizes overflows; the format's own limit is far below.
    if (bytes_of(heads, row_bytes, tokens) >= 1e12)
      throw py::value_error("splitzip: a block has more values than can be coded at once");
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      bounds.push_back(splitzip::bound(shape, layer));
      if (!bounds.back()) throw py::value_error("splitzip: a layer has more values than can be coded at once");
    }
  }
  std::uint64_t bound() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t nbytes : bounds) sum += nbytes;
    return sum;
  }
};

using Halves = py::array_t<std::uint16_t, py::array::c_style>;

std::unique_ptr<entropy::Model> entropy_model(const Halves& freqs, const Halves& costs) {
  const py::ssize_t size = 2 * entropy::kClasses * entropy::kSymbols;
  if (freqs.size() != size || costs.size() != size) throw py::value_error("tables: expected [2, 16, 193]");
  auto model = std::make_unique<entropy::Model>();
  if (!model->build(freqs.data(), costs.data())) throw py::value_error("tables: frequencies must sum to 4096");
  return model;
}

// The most bytes that a block can take, and what it takes usually.
py::tuple bounds(const std::string& dtype, const Ints& heads, const Ints& row_bytes, std::size_t tokens, bool entropy) {
  const Call call(dtype, heads, row_bytes, tokens);
  std::uint64_t usual = splitzip::kChunk;  // the last chunk is begun only if it fits, whatever it holds
  for (std::size_t layer = 0; layer < call.shape.layers; ++layer)
    usual += entropy ? entropy::usual(call.shape, layer) : splitzip::usual(call.shape, layer);
  return py::make_tuple(call.bound(), std::min(usual, call.bound()));
}

// The bytes of each layer; None if `out` is too short. model: codes with entropy if given.
py::object encode(const std::string& dtype, const Ints& heads, const Ints& row_bytes, std::size_t tokens,
                  const Longs& source, const py::buffer& out, const entropy::Model* model, const MaybeLevel& level) {
  const Call call(dtype, heads, row_bytes, tokens);
  const auto rows = rows_of(source, static_cast<std::size_t>(heads.size()));
  const Memory memory(out, true);
  const Level chosen = level_of(level);
  std::vector<std::uint64_t> sizes(call.shape.layers);
  const std::size_t raw = unlocked([&] {
    const auto capacity = memory.size();
    return model ? entropy::encode(*model, call.shape, rows.data(), memory.data(), capacity, sizes.data(), chosen)
                 : splitzip::encode(call.shape, rows.data(), memory.data(), capacity, sizes.data(), chosen);
  });
  return sizes_if(raw != splitzip::kTooShort, sizes);
}

// What is wrong with the payload, or None.
std::optional<std::string> decode(const std::string& dtype, const Ints& heads, const Ints& row_bytes,
                                  std::size_t tokens, const py::buffer& payload,
                                  const std::vector<std::uint64_t>& sizes, const Longs& target, std::size_t wanted,
                                  const entropy::Model* model, const MaybeLevel& level, bool large) {
  const Call call(dtype, heads, row_bytes, tokens);
  const auto rows = rows_of(target, static_cast<std::size_t>(heads.size()));
  check_layers(sizes, call.shape.layers);
  if (wanted > tokens) throw py::value_error("wanted: more tokens than there are");
  const Memory memory(payload, false);
  const Level chosen = level_of(level);
  return damage(model ? "entropy" : "splitzip", unlocked([&] {
    const std::uint8_t* const begin = memory.data();
    const std::uint64_t* const layers = sizes.data();
    return model ? entropy::decode(*model, call.shape, begin, memory.size(), layers, rows.data(), wanted, chosen)
                 : splitzip::decode(call.shape, begin, memory.size(), layers, rows.data(), wanted, chosen, large);
  }));
}

// Blocks of one codec whose layers are decoded one after the other, many blocks with one call. Payloads and `owner`,
// which keeps the target's memory, live as long as this. Any number of threads may decode at once.
class LayerBlocks {
 public:
  LayerBlocks(const std::string& dtype, const Ints& heads, const Ints& row_bytes, const Longs& target,
              std::size_t capacity, const py::object& owner, const entropy::Model* model, const MaybeLevel& level)
      : owner_(owner),
        dtype_(dtype),
        heads_(heads),
        row_bytes_(row_bytes),
        rows_(rows_of(target, static_cast<std::size_t>(heads.size()))),
        capacity_(capacity),
        model_(model),
        level_(level_of(level)) {
    const Call check(dtype, heads, row_bytes, 1);
  }

  // A block of `tokens` tokens, the first `wanted` of which go to row `at` and those behind it.
  void add(const py::buffer& payload, const std::vector<std::uint64_t>& sizes, std::size_t tokens, std::size_t at,
           std::size_t wanted) {
    const Call call(dtype_, heads_, row_bytes_, tokens);
    check_layers(sizes, call.shape.layers);
    if (wanted > tokens) throw py::value_error("wanted: more tokens than there are");
    if (at > capacity_ || wanted > capacity_ - at) throw py::value_error("at: the target has no such rows");
    auto block = std::make_unique<Block>(Block{Memory(payload, false), call.shape, sizes, {0}, at, wanted});
    for (const std::uint64_t nbytes : sizes) {
      if (nbytes > block->memory.size() - block->begins.back())
        throw py::value_error("sizes: more than the payload has");
      block->begins.push_back(block->begins.back() + static_cast<std::size_t>(nbytes));
    }
    blocks_.push_back(std::move(block));
  }

  // Decodes layers [first, last) of blocks [begin, end); the numbers of the blocks that are damaged there.
  std::vector<std::size_t> decode(std::size_t first, std::size_t last, std::size_t begin, std::size_t end) const {
    if (first > last || last > rows_.size() / 2) throw py::value_error("layers: the blocks have no such layers");
    if (begin > end || end > blocks_.size()) throw py::value_error("blocks: there are no such blocks");
    std::vector<std::size_t> bad;
    unlocked([&] {
      for (std::size_t number = begin; number < end; ++number)
        if (decode_block(*blocks_[number], first, last)) bad.push_back(number);
    });
    return bad;
  }

 private:
  struct Block {
    Memory memory;
    splitzip::Shape shape;
    std::vector<std::uint64_t> sizes;
    std::vector<std::size_t> begins;  // of the layers, and the end of the last
    std::size_t at, wanted;
  };

  const char* decode_block(const Block& block, std::size_t first, std::size_t last) const {
    splitzip::Shape shape = block.shape;
    shape.layers = last - first;
    shape.heads += 2 * first;
    shape.row_bytes += 2 * first;
    std::vector<Rows> rows(rows_.begin() + static_cast<std::ptrdiff_t>(2 * first),
                           rows_.begin() + static_cast<std::ptrdiff_t>(2 * last));
    for (Rows& row : rows)
      row.address += static_cast<std::uint64_t>(row.token_stride * static_cast<std::int64_t>(block.at));
    const std::uint8_t* const from = block.memory.data() + block.begins[first];
    const std::size_t nbytes = block.begins[last] - block.begins[first];
    const std::uint64_t* const sizes = block.sizes.data() + first;
    return model_ ? entropy::decode(*model_, shape, from, nbytes, sizes, rows.data(), block.wanted, level_)
                  : splitzip::decode(shape, from, nbytes, sizes, rows.data(), block.wanted, level_);
  }

  const py::object owner_;
  const std::string dtype_;
  const Ints heads_, row_bytes_;  // hold what the shapes point to
  const std::vector<Rows> rows_;
  const std::size_t capacity_;
  const entropy::Model* const model_;
  const Level level_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "C++ core of kvstore.codecs.";
  m.def("copy_rows", &copy, py::arg("target"), py::arg("source"), py::arg("heads"), py::arg("row_bytes"),
        py::arg("tokens"), py::arg("large") = false, py::arg("unlock") = false);
  m.def("pack", &pack, py::arg("out"), py::arg("source"), py::arg("heads"), py::arg("row_bytes"), py::arg("tokens"),
        py::arg("unlock") = false);
  m.def("pack_all", &pack_all, py::arg("outs"), py::arg("sources"), py::arg("heads"), py::arg("row_bytes"),
        py::arg("tokens"), py::arg("level") = py::none());
  m.def("unpack", &unpack, py::arg("target"), py::arg("packed"), py::arg("heads"), py::arg("row_bytes"),
        py::arg("tokens"), py::arg("wanted"), py::arg("large") = false, py::arg("unlock") = false);
  m.def("unpack_all", &unpack_all, py::arg("target"), py::arg("capacity"), py::arg("packed"), py::arg("heads"),
        py::arg("row_bytes"), py::arg("tokens"), py::arg("at"), py::arg("wanted"), py::arg("large") = false);
  py::class_<entropy::Model>(m, "EntropyModel")
      .def(py::init(&entropy_model), py::arg("freqs"), py::arg("costs"));
  py::class_<LayerBlocks>(m, "LayerBlocks")
      .def(py::init<const std::string&, const Ints&, const Ints&, const Longs&, std::size_t, const py::object&,
                    const entropy::Model*, const MaybeLevel&>(),
           py::arg("dtype"), py::arg("heads"), py::arg("row_bytes"), py::arg("target"), py::arg("capacity"),
           py::arg("owner"), py::arg("model") = py::none(), py::arg("level") = py::none(), py::keep_alive<1, 8>())
      .def("add", &LayerBlocks::add, py::arg("payload"), py::arg("sizes"), py::arg("tokens"), py::arg("at"),
           py::arg("wanted"))
      .def("decode", &LayerBlocks::decode, py::arg("first"), py::arg("last"), py::arg("begin"), py::arg("end"));
  m.def("bounds", &bounds, py::arg("dtype"), py::arg("heads"), py::arg("row_bytes"), py::arg("tokens"),
        py::arg("entropy") = false);
  m.def("encode", &encode, py::arg("dtype"), py::arg("heads"), py::arg("row_bytes"), py::arg("tokens"),
        py::arg("source"), py::arg("out"), py::arg("model") = py::none(), py::arg("level") = py::none());
  m.def("decode", &decode, py::arg("dtype"), py::arg("heads"), py::arg("row_bytes"), py::arg("tokens"),
        py::arg("payload"), py::arg("sizes"), py::arg("target"), py::arg("wanted"), py::arg("model") = py::none(),
        py::arg("level") = py::none(), py::arg("large") = false);
}
