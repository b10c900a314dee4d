// Attention over a paged pool, and the small operations between matrix products, for CPUs.
//
// Owns arithmetic only: every pointer, length and table was checked by the caller (actors/engine/native/ops.py).
// Invariants: a row's result depends on its own sequence's context alone and never on the batch around it; a slot outside that
// context is never read. Portable through GCC vector extensions; the inner products use AVX512-BF16 where it is compiled in.
//
// Pool layout: [blocks, kv_heads, layers, 2, block_size, head_dim], keys before values.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define CPD_DOT_BF16 1
#else
#define CPD_DOT_BF16 0
#endif

namespace {

constexpr int LANES = 16;
constexpr int KEY_TILE = 128;      // keys a chunk's tile looks at together
constexpr int SPLIT_TOKENS = 256;  // context that one unit of decode work covers; fixed, so that results do not depend on the batch
constexpr int MAX_GROUP = 8;       // query heads of one KV head that decode handles in one pass
constexpr int TILE_ROWS = 192;      // query rows that share one packed tile of keys and values
constexpr float NEVER = -std::numeric_limits<float>::infinity();

int threads = 1;

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

inline F16 broadcast(float x) { return F16{} + x; }

inline F16 load(const float* p) {
  F16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, F16 v) { std::memcpy(p, &v, sizeof v); }

inline F16 load(const bf16* p) {
  H16 h;
  std::memcpy(&h, p, sizeof h);
  return (F16)(__builtin_convertvector(h, U16) << 16);
}

// round to nearest, ties to even; a NaN stays one
inline U16 round_bits(F16 v) {
  U16 u = (U16)v;
  U16 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return v != v ? U16{} + 0x7fc0 : rounded;
}

inline void store(bf16* p, F16 v) {
#if CPD_DOT_BF16
  const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
  const H16 h = __builtin_convertvector(round_bits(v), H16);
#endif
  std::memcpy(p, &h, sizeof h);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

template <typename T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  return bf16{uint16_t(round_bits(broadcast(x))[0])};
}

// the value as T would hold it
inline F16 as_held(F16 v, const float*) { return v; }
inline F16 as_held(F16 v, const bf16*) { return (F16)(round_bits(v) << 16); }

inline F16 larger(F16 a, F16 b) { return a > b ? a : b; }

// lanes moved by 8, 4, 2 and 1 places, so that four steps reduce a vector
inline F16 moved_8(F16 v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); }
inline F16 moved_4(F16 v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11); }
inline F16 moved_2(F16 v) { return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13); }
inline F16 moved_1(F16 v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14); }

inline float sum(F16 v) {
  v += moved_8(v);
  v += moved_4(v);
  v += moved_2(v);
  v += moved_1(v);
  return v[0];
}

inline float largest(F16 v) {
  v = larger(v, moved_8(v));
  v = larger(v, moved_4(v));
  v = larger(v, moved_2(v));
  v = larger(v, moved_1(v));
  return v[0];
}

// e^x for x <= 88: 2^n e^r with |r| <= ln2 / 2 and a degree-6 Taylor polynomial (relative error below 2e-7); 0 below -87
inline F16 exponential(F16 x) {
  const F16 shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
  const F16 shifted = x * 1.44269504f + shift;
  const F16 n = shifted - shift;
  const F16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
  F16 p = r * (1.0f / 720) + (1.0f / 120);
  p = p * r + (1.0f / 24);
  p = p * r + (1.0f / 6);
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const F16 result = (F16)((I16)p + (((I16)shifted - (I16)shift) << 23));
  // comparisons with NaN are false, so a NaN passes through: its exponent bits stay set, whatever is added to them
  return x < -87.0f ? F16{} : (x == x ? result : x);
}

// ---------------------------------------------------------------------------------------------------- between the products

template <typename T>
void add_rms_norm(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * dim > 65536)
  for (int64_t row = 0; row < rows; ++row) {
    T* at = x + row * dim;
    const T* add = delta ? delta + row * dim : nullptr;
    F16 squares{};
    float tail = 0;
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
      F16 v = load(at + i);
      if (add) {
        v = as_held(v + load(add + i), at);
        store(at + i, v);
      }
      squares += v * v;
    }
    for (; i < dim; ++i) {
      float v = to_float(at[i]);
      if (add) {
        at[i] = from_float<T>(v + to_float(add[i]));
        v = to_float(at[i]);
      }
      tail += v * v;
    }
    const float scale = 1.0f / std::sqrt((sum(squares) + tail) / float(dim) + eps);
    T* to = out + row * dim;
    for (i = 0; i + LANES <= dim; i += LANES) store(to + i, as_held(load(at + i) * scale, at) * load(weight + i));
    for (; i < dim; ++i) to[i] = from_float<T>(to_float(from_float<T>(to_float(at[i]) * scale)) * to_float(weight[i]));
  }
}

template <typename T>
void gated_silu(const T* gates, const T* ups, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > 32768)
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = gates + row * width;
    const T* up = ups + row * width;
    T* to = out + row * width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
      F16 g = load(gate + i);
      store(to + i, as_held(g / (1.0f + exponential(g < -87.0f ? broadcast(87.0f) : -g)), out) * load(up + i));
    }
    for (; i < width; ++i) {
      float g = to_float(gate[i]);
      to[i] = from_float<T>(to_float(from_float<T>(g / (1.0f + std::exp(-g)))) * to_float(up[i]));
    }
  }
}

// rotate the first `rotary` dimensions of the first `heads` heads of each row, halves against each other, in place
template <typename T>
void rotate(T* x, const T* cosine, const T* sine, int64_t rows, int64_t row_stride, int64_t heads, int64_t head_dim, int64_t rotary) {
  const int64_t half = rotary / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * heads * head_dim > 32768)
  for (int64_t row = 0; row < rows; ++row) {
    const T* c = cosine + row * rotary;
    const T* s = sine + row * rotary;
    for (int64_t head = 0; head < heads; ++head) {
      T* a = x + row * row_stride + head * head_dim;
      T* b = a + half;
      int64_t i = 0;
      for (; i + LANES <= half; i += LANES) {
        F16 low = load(a + i), high = load(b + i);
        store(a + i, low * load(c + i) - high * load(s + i));
        store(b + i, high * load(c + half + i) + low * load(s + half + i));
      }
      for (; i < half; ++i) {
        float low = to_float(a[i]), high = to_float(b[i]);
        a[i] = from_float<T>(low * to_float(c[i]) - high * to_float(s[i]));
        b[i] = from_float<T>(high * to_float(c[half + i]) + low * to_float(s[half + i]));
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- the pool

// One step's view of the pool; mirrored by `PoolView` in ops.py.
struct PoolView {
  void* pool;
  int64_t kv_heads, layers, block_size, head_dim, group;  // group: query heads of a KV head
};

template <typename T>
struct Layer {
  T* base;
  int64_t block_stride, head_stride, block_size, head_dim;

  Layer(const PoolView& view, int64_t layer)
      : base(static_cast<T*>(view.pool) + layer * 2 * view.block_size * view.head_dim),
        block_stride(view.kv_heads * view.layers * 2 * view.block_size * view.head_dim),
        head_stride(view.layers * 2 * view.block_size * view.head_dim),
        block_size(view.block_size),
        head_dim(view.head_dim) {}

  T* key(int64_t block, int64_t head, int64_t offset) const { return base + block * block_stride + head * head_stride + offset * head_dim; }
  T* value(int64_t block, int64_t head, int64_t offset) const { return key(block, head, offset) + block_size * head_dim; }
};

template <typename T>
void write_kv(const PoolView& view, int64_t layer_index, const T* key, int64_t key_stride, const T* value, int64_t value_stride,
              const int64_t* blocks, const int64_t* offsets, int64_t rows) {
  const Layer<T> layer(view, layer_index);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < view.kv_heads; ++head) {
      const int64_t bytes = int64_t(sizeof(T)) * view.head_dim, at = head * view.head_dim;
      std::memcpy(layer.key(blocks[row], head, offsets[row]), key + row * key_stride + at, bytes);
      std::memcpy(layer.value(blocks[row], head, offsets[row]), value + row * value_stride + at, bytes);
    }
}

// --------------------------------------------------------------------------------------------------------------- decode

// `dots[g]` = query g . key, for GROUP queries `stride` apart
template <int GROUP>
inline void dots(const float* query, int64_t stride, const float* key, int64_t dim, float* result) {
  F16 acc[GROUP] = {};
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    F16 k = load(key + i);
    for (int g = 0; g < GROUP; ++g) acc[g] += load(query + g * stride + i) * k;
  }
  for (int g = 0; g < GROUP; ++g) {
    float s = sum(acc[g]);
    for (int64_t j = i; j < dim; ++j) s += query[g * stride + j] * key[j];
    result[g] = s;
  }
}

template <int GROUP>
inline void dots(const bf16* query, int64_t stride, const bf16* key, int64_t dim, float* result) {
  F16 acc[GROUP] = {};
  int64_t i = 0;
#if CPD_DOT_BF16
  for (; i + 2 * LANES <= dim; i += 2 * LANES) {
    const __m512bh k = (__m512bh)_mm512_loadu_si512(key + i);
    for (int g = 0; g < GROUP; ++g)
      acc[g] = (F16)_mm512_dpbf16_ps((__m512)acc[g], (__m512bh)_mm512_loadu_si512(query + g * stride + i), k);
  }
#endif
  for (; i + LANES <= dim; i += LANES) {
    F16 k = load(key + i);
    for (int g = 0; g < GROUP; ++g) acc[g] += load(query + g * stride + i) * k;
  }
  for (int g = 0; g < GROUP; ++g) {
    float s = sum(acc[g]);
    for (int64_t j = i; j < dim; ++j) s += to_float(query[g * stride + j]) * to_float(key[j]);
    result[g] = s;
  }
}

// acc[g][d] += sum over `count` keys of weight[g][key] * value[key][d], for COLUMNS vectors of d
template <int GROUP, int COLUMNS, typename T>
inline void weigh(const T* value, int64_t dim, const float* weights, int64_t weight_stride, int64_t count, float* acc, int64_t acc_stride) {
  F16 held[GROUP][COLUMNS];
  for (int g = 0; g < GROUP; ++g)
    for (int c = 0; c < COLUMNS; ++c) held[g][c] = load(acc + g * acc_stride + c * LANES);
  for (int64_t k = 0; k < count; ++k) {
    F16 v[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) v[c] = load(value + k * dim + c * LANES);
    for (int g = 0; g < GROUP; ++g) {
      const F16 w = broadcast(weights[g * weight_stride + k]);
      for (int c = 0; c < COLUMNS; ++c) held[g][c] += w * v[c];
    }
  }
  for (int g = 0; g < GROUP; ++g)
    for (int c = 0; c < COLUMNS; ++c) store(acc + g * acc_stride + c * LANES, held[g][c]);
}

template <int GROUP, typename T>
inline void weigh_all(const T* value, int64_t dim, const float* weights, int64_t weight_stride, int64_t count, float* acc) {
  int64_t d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES) weigh<GROUP, 4>(value + d, dim, weights, weight_stride, count, acc + d, dim);
  for (; d + LANES <= dim; d += LANES) weigh<GROUP, 1>(value + d, dim, weights, weight_stride, count, acc + d, dim);
  for (; d < dim; ++d)
    for (int g = 0; g < GROUP; ++g)
      for (int64_t k = 0; k < count; ++k) acc[g * dim + d] += weights[g * weight_stride + k] * to_float(value[k * dim + d]);
}

// Softmax-weighted values of context [from, to) for GROUP queries: unnormalised sums in `acc`, with the peak and the sum of weights.
template <int GROUP, typename T>
void attend_split(const Layer<T>& layer, int64_t head, const int32_t* table, int64_t from, int64_t to, const T* query, float scale,
                  float* acc, float* peak, float* total) {
  float weights[GROUP][SPLIT_TOKENS];
  const int64_t size = layer.block_size, dim = layer.head_dim, count = to - from;
  for (int64_t at = from; at < to;) {
    const int64_t offset = at % size, end = std::min(to, at - offset + size);
    const T* key = layer.key(table[at / size], head, offset);
    for (; at < end; ++at, key += dim) {
      float scores[GROUP];
      dots<GROUP>(query, dim, key, dim, scores);
      for (int g = 0; g < GROUP; ++g) weights[g][at - from] = scores[g] * scale;
    }
  }
  for (int g = 0; g < GROUP; ++g) {
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    std::fill(weights[g] + count, weights[g] + padded, NEVER);
    F16 high = load(weights[g]);
    for (int64_t i = LANES; i < padded; i += LANES) high = larger(high, load(weights[g] + i));
    peak[g] = largest(high);
    F16 sums{};
    for (int64_t i = 0; i < padded; i += LANES) {
      const F16 w = exponential(load(weights[g] + i) - peak[g]);
      store(weights[g] + i, w);
      sums += w;
    }
    total[g] = sum(sums);
  }
  std::fill(acc, acc + GROUP * dim, 0.0f);
  for (int64_t at = from; at < to;) {
    const int64_t offset = at % size, end = std::min(to, at - offset + size);
    weigh_all<GROUP>(layer.value(table[at / size], head, offset), dim, &weights[0][at - from], SPLIT_TOKENS, end - at, acc);
    at = end;
  }
}

template <typename T>
void attend_group(int group, const Layer<T>& layer, int64_t head, const int32_t* table, int64_t from, int64_t to, const T* query,
                  float scale, float* acc, float* peak, float* total) {
  switch (group) {
    case 1: return attend_split<1>(layer, head, table, from, to, query, scale, acc, peak, total);
    case 2: return attend_split<2>(layer, head, table, from, to, query, scale, acc, peak, total);
    case 3: return attend_split<3>(layer, head, table, from, to, query, scale, acc, peak, total);
    case 4: return attend_split<4>(layer, head, table, from, to, query, scale, acc, peak, total);
    case 5: return attend_split<5>(layer, head, table, from, to, query, scale, acc, peak, total);
    case 6: return attend_split<6>(layer, head, table, from, to, query, scale, acc, peak, total);
    case 7: return attend_split<7>(layer, head, table, from, to, query, scale, acc, peak, total);
    default: return attend_split<8>(layer, head, table, from, to, query, scale, acc, peak, total);
  }
}

// `query` rows are `query_stride` apart, their heads contiguous; `out` [rows, query heads, head_dim]; window 0: none
template <typename T>
void decode(const PoolView& view, int64_t layer_index, const T* query, int64_t query_stride, const int32_t* tables, int64_t table_stride,
            const int32_t* lengths, int64_t rows, int64_t window, float scale, T* out) {
  struct Unit {
    int64_t row, head, from, to;
  };
  const Layer<T> layer(view, layer_index);
  const int64_t dim = view.head_dim, group = view.group;
  std::vector<Unit> units;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = window > 0 ? std::max<int64_t>(0, lengths[row] - window) : 0;
    for (int64_t head = 0; head < view.kv_heads; ++head)
      for (int64_t from = first; from < lengths[row]; from = (from / SPLIT_TOKENS + 1) * SPLIT_TOKENS)
        units.push_back({row, head, from, std::min<int64_t>(lengths[row], (from / SPLIT_TOKENS + 1) * SPLIT_TOKENS)});
  }
  const int64_t count = int64_t(units.size());
  std::vector<float> partial(count * group * dim), peaks(count * group), totals(count * group);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t u = 0; u < count; ++u) {
    const Unit& unit = units[u];
    const T* q = query + unit.row * query_stride + unit.head * group * dim;
    for (int64_t g = 0; g < group; g += MAX_GROUP)
      attend_group<T>(int(std::min<int64_t>(MAX_GROUP, group - g)), layer, unit.head, tables + unit.row * table_stride, unit.from, unit.to,
                      q + g * dim, scale, &partial[(u * group + g) * dim], &peaks[u * group + g], &totals[u * group + g]);
  }
  for (int64_t u = 0; u < count;) {  // units of one row and head are neighbours: merge them
    int64_t end = u;
    while (end < count && units[end].row == units[u].row && units[end].head == units[u].head) ++end;
    for (int64_t g = 0; g < group; ++g) {
      float peak = peaks[u * group + g], total = 0;
      for (int64_t i = u + 1; i < end; ++i) peak = std::max(peak, peaks[i * group + g]);
      float* sums = &partial[(u * group + g) * dim];
      for (int64_t i = u; i < end; ++i) {
        const float factor = std::exp(peaks[i * group + g] - peak);
        const float* add = &partial[(i * group + g) * dim];
        total += totals[i * group + g] * factor;
        for (int64_t d = 0; d < dim; ++d) sums[d] = i == u ? add[d] * factor : sums[d] + add[d] * factor;
      }
      T* to = out + (units[u].row * view.kv_heads + units[u].head) * group * dim + g * dim;
      for (int64_t d = 0; d < dim; ++d) to[d] = from_float<T>(sums[d] / total);
    }
    u = end;
  }
}

// --------------------------------------------------------------------------------------------------------------- chunks

// Operands are packed into 32-bit cells along the summed dimension: one float, or two neighbouring bf16 where the CPU has a dot product.
typedef float Single;
typedef uint32_t Pair;

template <typename Cell>
constexpr int EACH = std::is_same<Cell, Pair>::value ? 2 : 1;

inline F16 cells(const void* p) {
  F16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline F16 accumulate(F16 sum, Single a, F16 b) { return sum + a * b; }
#if CPD_DOT_BF16
inline F16 accumulate(F16 sum, Pair a, F16 b) {
  return (F16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int32_t(a)), (__m512bh)b);
}
#endif

// c[ROWS][COLUMNS * LANES] += a[ROWS][depth] . b[depth][COLUMNS * LANES]
template <int ROWS, int COLUMNS, typename Cell>
inline void multiply_tile(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride, int64_t depth, float* c, int64_t c_stride) {
  F16 held[ROWS][COLUMNS];
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < COLUMNS; ++j) held[r][j] = load(c + r * c_stride + j * LANES);
  for (int64_t k = 0; k < depth; ++k) {
    F16 right[COLUMNS];
    for (int j = 0; j < COLUMNS; ++j) right[j] = cells(b + k * b_stride + j * LANES);
    for (int r = 0; r < ROWS; ++r)
      for (int j = 0; j < COLUMNS; ++j) held[r][j] = accumulate(held[r][j], a[r * a_stride + k], right[j]);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < COLUMNS; ++j) store(c + r * c_stride + j * LANES, held[r][j]);
}

template <int COLUMNS, typename Cell>
void multiply_columns(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride, int64_t rows, int64_t depth, float* c, int64_t c_stride) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) multiply_tile<6, COLUMNS>(a + r * a_stride, a_stride, b, b_stride, depth, c + r * c_stride, c_stride);
  for (; r < rows; ++r) multiply_tile<1, COLUMNS>(a + r * a_stride, a_stride, b, b_stride, depth, c + r * c_stride, c_stride);
}

// c[rows][columns] += a[rows][depth] . b[depth][columns]; columns is a multiple of LANES
template <typename Cell>
void multiply(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride, int64_t rows, int64_t columns, int64_t depth, float* c,
              int64_t c_stride) {
  int64_t j = 0;
  for (; j + 4 * LANES <= columns; j += 4 * LANES) multiply_columns<4>(a, a_stride, b + j, b_stride, rows, depth, c + j, c_stride);
  for (; j < columns; j += LANES) multiply_columns<1>(a, a_stride, b + j, b_stride, rows, depth, c + j, c_stride);
}

// A row of `dim` elements as cells; `Pair` needs an even `dim`.
template <typename T>
inline void pack_row(const T* from, int64_t dim, Single* to) {
  for (int64_t d = 0; d < dim; ++d) to[d] = to_float(from[d]);
}
inline void pack_row(const bf16* from, int64_t dim, Pair* to) { std::memcpy(to, from, dim * sizeof(bf16)); }

inline void store_weights(Single* to, F16 v) { store(to, v); }
inline void store_weights(Pair* to, F16 v) { store(reinterpret_cast<bf16*>(to), v); }

// keys[cell of dim][KEY_TILE]
template <typename T, typename Cell>
void pack_keys(const T* const* rows, int64_t count, int64_t dim, Cell* to) {
  const int64_t depth = dim / EACH<Cell>;
  Cell row[512];
  for (int64_t j = 0; j < KEY_TILE; ++j) {
    if (j < count)
      pack_row(rows[j], dim, row);
    else
      std::fill(row, row + depth, Cell(0));
    for (int64_t d = 0; d < depth; ++d) to[d * KEY_TILE + j] = row[d];
  }
}

// values[cell of keys][width], zero beyond `count` keys and beyond `dim`
template <typename T>
void pack_values(const T* const* rows, int64_t count, int64_t dim, int64_t width, Single* to) {
  for (int64_t j = 0; j < KEY_TILE; ++j) {
    std::fill(to + j * width, to + (j + 1) * width, 0.0f);
    if (j < count) pack_row(rows[j], dim, to + j * width);
  }
}
inline void pack_values(const bf16* const* rows, int64_t count, int64_t dim, int64_t width, Pair* to) {
  static const bf16 nothing[1024] = {};
  for (int64_t j = 0; j < KEY_TILE; j += 2, to += width) {
    const bf16* even = j < count ? rows[j] : nothing;
    const bf16* odd = j + 1 < count ? rows[j + 1] : nothing;
    for (int64_t d = 0; d < dim; ++d) to[d] = Pair(even[d].bits) | Pair(odd[d].bits) << 16;
    std::fill(to + dim, to + width, Pair(0));
  }
}

struct Chunk {
  const int64_t* blocks;
  int64_t start, count, window;  // window 0: none
  float scale;
};

// One tile of queries (tokens [first, first + tokens) of the chunk, the heads of one KV head) against their whole context.
template <typename T, typename Cell>
class QueryTile {
 public:
  QueryTile(const PoolView& view, int64_t max_tokens)
      : view_(view), width_((view.head_dim + LANES - 1) / LANES * LANES), depth_(view.head_dim / EACH<Cell>) {
    const int64_t rows = max_tokens * view.group;
    queries_.resize(rows * depth_);
    keys_.resize(depth_ * KEY_TILE);
    values_.resize(KEY_TILE / EACH<Cell> * width_);
    scores_.resize(rows * KEY_TILE);
    weights_.resize(rows * KEY_TILE / EACH<Cell>);
    sums_.resize(rows * width_);
    peaks_.resize(rows);
    totals_.resize(rows);
  }

  void run(const Chunk& chunk, int64_t layer_index, int64_t head, int64_t first, int64_t tokens, const T* query, int64_t query_stride, T* out) {
    const Layer<T> layer(view_, layer_index);
    const int64_t dim = view_.head_dim, group = view_.group, rows = tokens * group;
    for (int64_t r = 0; r < rows; ++r)
      pack_row(query + (first + r / group) * query_stride + (head * group + r % group) * dim, dim, &queries_[r * depth_]);
    std::fill(sums_.begin(), sums_.begin() + rows * width_, 0.0f);
    std::fill(peaks_.begin(), peaks_.begin() + rows, NEVER);
    std::fill(totals_.begin(), totals_.begin() + rows, 0.0f);
    const int64_t position = chunk.start + first, end = position + tokens;
    int64_t key = chunk.window > 0 ? std::max<int64_t>(0, position - chunk.window + 1) / KEY_TILE * KEY_TILE : 0;
    for (; key < end; key += KEY_TILE) tile(chunk, layer, head, key, std::min<int64_t>(KEY_TILE, end - key), position, rows);
    for (int64_t r = 0; r < rows; ++r) {
      T* to = out + ((first + r / group) * view_.kv_heads + head) * group * dim + r % group * dim;
      for (int64_t d = 0; d < dim; ++d) to[d] = from_float<T>(sums_[r * width_ + d] / totals_[r]);
    }
  }

 private:
  void tile(const Chunk& chunk, const Layer<T>& layer, int64_t head, int64_t key, int64_t count, int64_t position, int64_t rows) {
    const T *key_rows[KEY_TILE], *value_rows[KEY_TILE];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t block = chunk.blocks[(key + j) / layer.block_size], offset = (key + j) % layer.block_size;
      key_rows[j] = layer.key(block, head, offset);
      value_rows[j] = layer.value(block, head, offset);
    }
    pack_keys(key_rows, count, layer.head_dim, keys_.data());
    pack_values(value_rows, count, layer.head_dim, width_, values_.data());
    std::fill(scores_.begin(), scores_.begin() + rows * KEY_TILE, 0.0f);
    multiply(queries_.data(), depth_, keys_.data(), KEY_TILE, rows, KEY_TILE, depth_, scores_.data(), KEY_TILE);
    for (int64_t r = 0; r < rows; ++r) weigh_row(chunk, key, position + r / view_.group, r);
    multiply(weights_.data(), KEY_TILE / EACH<Cell>, values_.data(), width_, rows, width_, KEY_TILE / EACH<Cell>, sums_.data(), width_);
  }

  // scores of one row -> weights; rescales what the row has summed so far when its peak rises
  void weigh_row(const Chunk& chunk, int64_t key, int64_t position, int64_t r) {
    constexpr int VECTORS = KEY_TILE / LANES;
    F16 score[VECTORS];
    for (int i = 0; i < VECTORS; ++i) score[i] = load(&scores_[r * KEY_TILE + i * LANES]) * chunk.scale;
    const int64_t last = position - key, first = chunk.window > 0 ? last - chunk.window + 1 : 0;
    if (last < KEY_TILE - 1 || first > 0) hide(score, first, last);
    F16 high = score[0];
    for (int i = 1; i < VECTORS; ++i) high = larger(high, score[i]);
    const float peak = std::max(peaks_[r], largest(high));
    Cell* to = &weights_[r * KEY_TILE / EACH<Cell>];
    if (peak == NEVER) {
      std::fill(to, to + KEY_TILE / EACH<Cell>, Cell(0));
      return;
    }
    F16 sums{};
    for (int i = 0; i < VECTORS; ++i) {
      const F16 w = exponential(score[i] - peak);
      store_weights(to + i * LANES / EACH<Cell>, w);
      sums += w;
    }
    if (peak != peaks_[r]) {
      const float factor = std::exp(peaks_[r] - peak);
      for (int64_t d = 0; d < width_; d += LANES) store(&sums_[r * width_ + d], load(&sums_[r * width_ + d]) * factor);
      totals_[r] *= factor;
      peaks_[r] = peak;
    }
    totals_[r] += sum(sums);
  }

  // slots before `first` and after `last` are none of the row's
  static void hide(F16* score, int64_t first, int64_t last) {
    const I16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int32_t low = int32_t(std::min<int64_t>(first, KEY_TILE)), high = int32_t(std::min<int64_t>(last, KEY_TILE));
    for (int i = 0; i < KEY_TILE / LANES; ++i) {
      const I16 slot = lanes + i * LANES;
      score[i] = (slot <= high) & (slot >= low) ? score[i] : broadcast(NEVER);
    }
  }

  const PoolView& view_;
  int64_t width_, depth_;
  std::vector<Cell> queries_, keys_, values_, weights_;
  std::vector<float> scores_, sums_, peaks_, totals_;
};

template <typename T>
struct CellOf {
  typedef Single type;
};
#if CPD_DOT_BF16
template <>
struct CellOf<bf16> {
  typedef Pair type;
};
#endif

template <typename T>
void chunk(const PoolView& view, int64_t layer, const Chunk& what, const T* query, int64_t query_stride, T* out) {
  int64_t tokens = std::max<int64_t>(8, TILE_ROWS / view.group);
  const auto units = [&] { return (what.count + tokens - 1) / tokens * view.kv_heads; };
  while (tokens > 8 && units() < 4 * threads) tokens = std::max<int64_t>(8, tokens / 2);
  const int64_t count = units();
#pragma omp parallel num_threads(threads)
  {
    QueryTile<T, typename CellOf<T>::type> tile(view, tokens);
#pragma omp for schedule(dynamic, 1)
    for (int64_t u = count - 1; u >= 0; --u) {  // late tiles see the most context: longest work first
      const int64_t first = u / view.kv_heads * tokens;
      tile.run(what, layer, u % view.kv_heads, first, std::min(tokens, what.count - first), query, query_stride, out);
    }
  }
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- C interface

extern "C" {

void cpd_set_threads(int32_t count) { threads = count; }
int32_t cpd_has_bf16_dot() { return CPD_DOT_BF16; }

#define CPD_FOR_TYPE(T, SUFFIX)                                                                                                        \
  void cpd_add_rms_norm_##SUFFIX(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t dim, float eps) {                 \
    add_rms_norm<T>(x, delta, weight, out, rows, dim, eps);                                                                            \
  }                                                                                                                                    \
  void cpd_gated_silu_##SUFFIX(const T* gates, const T* ups, T* out, int64_t rows, int64_t width) {                                              \
    gated_silu<T>(gates, ups, out, rows, width);                                                                                       \
  }                                                                                                                                    \
  void cpd_rotate_##SUFFIX(T* x, const T* cosine, const T* sine, int64_t rows, int64_t row_stride, int64_t heads, int64_t head_dim,     \
                           int64_t rotary) {                                                                                           \
    rotate<T>(x, cosine, sine, rows, row_stride, heads, head_dim, rotary);                                                             \
  }                                                                                                                                    \
  void cpd_write_kv_##SUFFIX(const PoolView* view, int64_t layer, const T* key, int64_t key_stride, const T* value,                    \
                             int64_t value_stride, const int64_t* blocks, const int64_t* offsets, int64_t rows) {                      \
    write_kv<T>(*view, layer, key, key_stride, value, value_stride, blocks, offsets, rows);                                            \
  }                                                                                                                                    \
  void cpd_decode_##SUFFIX(const PoolView* view, int64_t layer, const T* query, int64_t query_stride, const int32_t* tables,            \
                           int64_t table_stride, const int32_t* lengths, int64_t rows, int64_t window, float scale, T* out) {           \
    decode<T>(*view, layer, query, query_stride, tables, table_stride, lengths, rows, window, scale, out);                             \
  }                                                                                                                                    \
  void cpd_chunk_##SUFFIX(const PoolView* view, int64_t layer, const T* query, int64_t query_stride, const int64_t* blocks,             \
                          int64_t start, int64_t count, int64_t window, float scale, T* out) {                                         \
    chunk<T>(*view, layer, Chunk{blocks, start, count, window, scale}, query, query_stride, out);                                      \
  }

CPD_FOR_TYPE(float, f32)
CPD_FOR_TYPE(bf16, bf16)
}
