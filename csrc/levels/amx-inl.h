// AMX twins of the products of the levels: 16 rows of 64 inputs by 16 columns at once (TDPBUSD), into the same sums of
// 32 bits. All else is as with AVX-512. Included by levels/dispatch.h only.
#pragma once

#include "common/simd.h"

#if defined(KVSTORE_AMX)
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "common/intrinsics_begin.h"
#include "levels/avx512-inl.h"

namespace kvstore::levels::amx {

constexpr std::size_t kTileRows = 16;
constexpr std::size_t kTileBytes = 64;                // of a row of a tile
constexpr std::size_t kQuad = kTileBytes / kColumns;  // groups of inputs that a tile takes
constexpr std::size_t kAhead = 8;                     // weights are fetched so many tiles of inputs before their use
constexpr std::size_t kLine = predict::kColumnsBytes;
constexpr std::size_t kWeights = kSteps * kLine;      // bytes from a group's inputs to a group's columns

// Whether this process may use the registers: Linux gives each process their memory when it asks (arch_prctl(2)).
inline bool runs() {
  static const bool has = [] {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return predict::avx512::runs() && ::syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return has;
}

// What the tiles are: 0 to 3 sums, 4 and 5 inputs, 6 and 7 weights.
struct alignas(64) Shapes {
  std::uint8_t palette = 1, start = 0, zeros[14] = {};
  std::uint16_t bytes[16] = {};  // of a row
  std::uint8_t rows[16] = {};

  // input_bytes: of a row of inputs
  explicit Shapes(std::size_t input_bytes) {
    for (int i = 0; i < 8; ++i) {
      rows[i] = kTileRows;
      bytes[i] = kTileBytes;
    }
    for (const int i : {4, 5}) bytes[i] = static_cast<std::uint16_t>(input_bytes);
    for (const int i : {6, 7}) rows[i] = static_cast<std::uint8_t>(input_bytes / 4);
  }
};

// Gives the tiles their shapes. GCC's intrinsics do not say what memory they read: all must be written by then.
KVSTORE_AMX_INLINE void begin_tiles(const Shapes& shapes) {
  __asm__ volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
}

// Inputs of a block in tiles: [depth / kQuad][rows][kTileBytes].
struct Packed {
  std::size_t rows = 0;  // whole tiles of them
  predict::Lines lines;
  std::vector<const std::uint8_t*> groups;  // of inputs, as they came

  KVSTORE_VNNI void pack(const Part& part, const Summed& block) {
    rows = block.rows.padded / kTileRows * kTileRows;
    groups.clear();
    for (std::size_t i = 0; i < part.inputs.size(); ++i)
      for (std::size_t g = 0; g < part.depths[i]; ++g)
        groups.push_back(block.inputs[i] + g * block.rows.padded * kColumns);
    if (rows == 0) return;
    const std::size_t quads = groups.size() / kQuad;
    if (lines.size() < quads * rows) lines.resize(quads * rows);
    for (std::size_t n = 0; n < quads * kQuad; ++n) {
      auto* to = reinterpret_cast<std::uint8_t*>(lines[n / kQuad * rows].bytes) + n % kQuad * kColumns;
      const std::uint8_t* from = groups[n];
      for (std::size_t t = 0; t < rows; ++t, to += kTileBytes, from += kColumns)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
  }

  const std::int8_t* tile(std::size_t quad, std::size_t row) const { return lines[quad * rows + row].bytes; }
};

// Memory of a thread, which it keeps.
inline std::vector<Packed>& packed() {
  static thread_local std::vector<Packed> memory;
  return memory;
}

// Sums of BLOCKS times 16 rows from `row` on, for COLUMNS groups. w: the weights of the first of these; stride: bytes
// from the weights of four inputs to those of the next four; ahead: what is brought nearer meanwhile, or 0.
template <int BLOCKS, int COLUMNS>
KVSTORE_AMX_INLINE void sum_tiles(const Group* groups, const std::int8_t* w, std::size_t stride, const Packed& in,
                                  std::size_t row, std::uintptr_t ahead, std::int32_t* sums, std::size_t group_bytes) {
  _tile_loadd(0, groups[0].bias, 0);
  if constexpr (COLUMNS == 2) _tile_loadd(1, groups[1].bias, 0);
  if constexpr (BLOCKS == 2) _tile_loadd(2, groups[0].bias, 0);
  if constexpr (BLOCKS == 2 && COLUMNS == 2) _tile_loadd(3, groups[1].bias, 0);
  const std::size_t quad_bytes = kQuad * kSteps * stride, quads = in.groups.size() / kQuad;
  for (std::size_t q = 0; q < quads; ++q, w += quad_bytes) {
    if (ahead != 0)
      for (const std::uintptr_t end = ahead + quad_bytes; ahead < end; ahead += kLine)
        _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
    _tile_loadd(4, in.tile(q, row), kTileBytes);
    _tile_loadd(6, w, stride);
    _tile_dpbusd(0, 4, 6);
    if constexpr (BLOCKS == 2) {
      _tile_loadd(5, in.tile(q, row + kTileRows), kTileBytes);
      _tile_dpbusd(2, 5, 6);
    }
    if constexpr (COLUMNS == 2) {
      _tile_loadd(7, w + kLine, stride);
      _tile_dpbusd(1, 4, 7);
      if constexpr (BLOCKS == 2) _tile_dpbusd(3, 5, 7);
    }
  }
  auto* const to = reinterpret_cast<std::uint8_t*>(sums + row * kColumns);
  constexpr std::size_t kBlock = kTileRows * kTileBytes;
  _tile_stored(0, to, kTileBytes);
  if constexpr (COLUMNS == 2) _tile_stored(1, to + group_bytes, kTileBytes);
  if constexpr (BLOCKS == 2) _tile_stored(2, to + kBlock, kTileBytes);
  if constexpr (BLOCKS == 2 && COLUMNS == 2) _tile_stored(3, to + kBlock + group_bytes, kTileBytes);
}

// Adds what the inputs from group `first` on bring, which do not fill a tile.
template <int WIDE>
KVSTORE_VNNI_INLINE void add_rest(const std::int8_t* w, const Packed& in, std::size_t first, std::int32_t* sums,
                                  std::size_t group_bytes) {
  for (int c = 0; c < WIDE; ++c) {
    auto* to = reinterpret_cast<std::uint8_t*>(sums) + static_cast<std::size_t>(c) * group_bytes;
    for (std::size_t t = 0; t < in.rows; ++t, to += kTileBytes) {
      __m512i total = _mm512_loadu_si512(to);
      for (std::size_t n = first; n < in.groups.size(); ++n) {
        const std::int8_t* const weights = w + n * kWeights * WIDE + kLine * c;
        for (std::size_t k = 0; k < kSteps; ++k)
          total = _mm512_dpbusd_epi32(total, avx512::four_of(in.groups[n] + t * kColumns + 4 * k),
                                      _mm512_load_si512(weights + k * kLine * WIDE));
      }
      _mm512_storeu_si512(to, total);
    }
  }
}

// What a panel of a block is summed from: its groups, their weights, and where its sums go.
struct Panel {
  const Group* groups;
  const std::int8_t* w;
  std::int32_t* sums;
  std::size_t group_bytes;  // from a group's sums to the next one's
};

// COLUMNS groups of a panel of WIDE, from group `first` on.
template <int WIDE, int COLUMNS>
KVSTORE_AMX_INLINE void sum_columns(const Panel& panel, std::size_t first, const Packed& in, std::size_t row,
                                    std::uintptr_t ahead) {
  constexpr std::size_t kStride = WIDE * kLine;
  const Group* const groups = panel.groups + first;
  const std::int8_t* const w = panel.w + first * kLine;
  std::int32_t* const to = panel.sums + first * panel.group_bytes / sizeof(std::int32_t);
  if (row + 2 * kTileRows <= in.rows)
    sum_tiles<2, COLUMNS>(groups, w, kStride, in, row, ahead, to, panel.group_bytes);
  else
    sum_tiles<1, COLUMNS>(groups, w, kStride, in, row, ahead, to, panel.group_bytes);
}

// The panel of one block. first: whether of the first one, which brings the weights.
template <int WIDE>
KVSTORE_AMX_INLINE void sum_block(const Part& part, const Panel& panel, const Packed& in, const Summed& block,
                                  bool first) {
  const std::size_t tiled = in.groups.size() / kQuad * kQuad;
  for (std::size_t row = 0; row < in.rows; row += 2 * kTileRows) {
    const std::uintptr_t here = reinterpret_cast<std::uintptr_t>(panel.w);
    const std::uintptr_t ahead = first && row == 0 ? here + kAhead * kQuad * kWeights * WIDE : 0;
    sum_columns<WIDE, WIDE == 1 ? 1 : 2>(panel, 0, in, row, ahead);
    if constexpr (WIDE == 3) sum_columns<WIDE, 1>(panel, 2, in, row, 0);
  }
  if (tiled < in.groups.size()) add_rest<WIDE>(panel.w, in, tiled, panel.sums, panel.group_bytes);
  for (std::size_t t = in.rows; t < block.rows.padded; t += kRows)
    avx512::sum_tile<kRows, WIDE>(part, panel.groups, panel.w, block, t, WIDE, panel.sums);
}

template <int WIDE>
KVSTORE_AMX void sum_panel(const Part& part, std::size_t number, const std::int8_t* w, const Packed* in,
                           const Summed* blocks, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t group_bytes = blocks[i].rows.padded * kTileBytes;
    const Panel panel{part.groups.data() + number, w, blocks[i].sums + number * blocks[i].rows.padded * kColumns,
                      group_bytes};
    sum_block<WIDE>(part, panel, in[i], blocks[i], i == 0);
  }
}

KVSTORE_AMX inline void sums(const Part& part, const std::int8_t* weight, const Summed* blocks, std::size_t count) {
  const std::size_t columns = part.groups.size();
  std::vector<Packed>& in = packed();
  if (in.size() < count) in.resize(count);
  for (std::size_t i = 0; i < count; ++i) in[i].pack(part, blocks[i]);
  const Shapes shapes(kTileBytes);
  begin_tiles(shapes);
  for (std::size_t panel = 0; panel < columns; panel += kMostPanel) {
    const std::int8_t* const w = weight + panel * part.depth * kWeights;
    switch (columns - panel) {
      case 1: sum_panel<1>(part, panel, w, in.data(), blocks, count); break;
      case 2: sum_panel<2>(part, panel, w, in.data(), blocks, count); break;
      default: sum_panel<3>(part, panel, w, in.data(), blocks, count);
    }
  }
  _tile_release();
}

// Sums of BLOCKS times 16 rows, one group of residuals at a time. A tile of 16 inputs takes as long as one of 64, but
// these need not be put together, and it takes half as long as AVX-512 does.
template <int BLOCKS>
KVSTORE_AMX_INLINE void group_tiles(const std::int8_t* w, std::size_t number, const std::int32_t* sums,
                                    std::size_t stride, const std::uint8_t* q, std::size_t padded,
                                    std::int32_t* found) {
  const std::size_t row_bytes = stride * sizeof *sums;
  _tile_loadd(0, sums, row_bytes);
  if constexpr (BLOCKS == 4) {
    _tile_loadd(1, sums + kTileRows * stride, row_bytes);
    _tile_loadd(2, sums + 2 * kTileRows * stride, row_bytes);
    _tile_loadd(3, sums + 3 * kTileRows * stride, row_bytes);
  }
  constexpr std::size_t kBlock = kTileRows * kColumns;
  for (std::size_t g = 0; g < number; ++g, w += kWeights, q += padded * kColumns) {
    _tile_loadd(6, w, kLine);
    _tile_loadd(4, q, kColumns);
    _tile_dpbusd(0, 4, 6);
    if constexpr (BLOCKS == 4) {
      _tile_loadd(5, q + kBlock, kColumns);
      _tile_dpbusd(1, 5, 6);
      _tile_loadd(4, q + 2 * kBlock, kColumns);
      _tile_dpbusd(2, 4, 6);
      _tile_loadd(5, q + 3 * kBlock, kColumns);
      _tile_dpbusd(3, 5, 6);
    }
  }
  _tile_stored(0, found, kTileBytes);
  if constexpr (BLOCKS == 4) {
    _tile_stored(1, found + kBlock, kTileBytes);
    _tile_stored(2, found + 2 * kBlock, kTileBytes);
    _tile_stored(3, found + 3 * kBlock, kTileBytes);
  }
}

KVSTORE_AMX inline void group(const Group& group, const std::int8_t* weight, std::size_t number,
                              const std::int32_t* sums, std::size_t stride, const std::uint8_t* residuals,
                              RowCount rows, std::int16_t* p) {
  constexpr std::size_t kFew = 4;  // groups before, which are not worth it
  const std::size_t whole = rows.padded / kTileRows * kTileRows;
  if (number < kFew || whole == 0) return avx512::group(group, weight, number, sums, stride, residuals, rows, p);
  const __m512i shift = _mm512_load_si512(group.shift);
  alignas(64) std::int32_t found[4 * kTileRows * kColumns];
  const Shapes shapes(kColumns);
  begin_tiles(shapes);
  for (std::size_t t = 0, here = 0; t < whole; t += here) {
    here = t + 4 * kTileRows <= whole ? 4 * kTileRows : kTileRows;
    const std::uint8_t* const q = residuals + t * kColumns;
    if (here == kTileRows)
      group_tiles<1>(weight, number, sums + t * stride, stride, q, rows.padded, found);
    else
      group_tiles<4>(weight, number, sums + t * stride, stride, q, rows.padded, found);
    for (std::size_t r = 0; r < here; ++r) {
      const __m512i total = _mm512_srav_epi32(_mm512_load_si512(found + r * kColumns), shift);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + (t + r) * kColumns), _mm512_cvtsepi32_epi16(total));
    }
  }
  _tile_release();
  if (whole < rows.padded)
    avx512::group_rows<kRows>(group, weight, number, sums + whole * stride, stride, residuals + whole * kColumns,
                              rows.padded, p + whole * kColumns);
}

KVSTORE_AMX inline std::uint64_t multiply(std::uint64_t rounds) {
  alignas(64) std::uint8_t numbers[kTileRows * kTileBytes] = {3};
  const Shapes shapes(kTileBytes);
  begin_tiles(shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, numbers, kTileBytes);
  _tile_loadd(6, numbers, kTileBytes);
  for (std::uint64_t i = 0; i < rounds; ++i) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 6);
    _tile_dpbusd(2, 4, 6);
    _tile_dpbusd(3, 4, 6);
  }
  _tile_release();
  return rounds * 4 * kTileRows * kColumns * kTileBytes;
}

inline constexpr Kernels kKernels = [] {
  Kernels made = avx512::kKernels;
  made.sums = sums;
  made.group = group;
  made.multiply = multiply;
  return made;
}();

}  // namespace kvstore::levels::amx

#include "common/intrinsics_end.h"
#endif
