// An NVFP4 layer for a few tokens, and A x of its adapter, in one launch. See decode_linear.py.
//
// The work, tiles of 16 inputs x 128 outputs, is dealt evenly to the blocks; one may end 128 outputs and begin the next.
// Of its 8 warps two work side by side, four interleaved along the inputs. A warp reads 16 inputs x 64 outputs with one
// 16-byte load a lane; the layout (marlin.py) gives each lane what it holds in mma.m16n8k16 with the weight as the left
// operand: outputs x inputs times inputs x tokens. The first blocks multiply by A [columns, inputs] in the same way.

typedef unsigned int u32;
#define TOKENS 8             // at most: the columns of mma
#define DEPTH 4              // tiles in flight a warp
#define RESIDENT 2           // blocks on a multiprocessor
#define SHIFT 0x7A807A80u    // 2^118, twice: BF16

#ifdef __CUDACC__
__device__ __forceinline__ u32 times(u32 a, u32 b) {  // two BF16 numbers each; subnormal ones count
  u32 product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// These two are opaque: a compiler that sees through them makes two masks of one in codes().
template <u32 mask> __device__ __forceinline__ u32 masked(u32 v) {
  u32 result;
  asm("and.b32 %0, %1, %2;" : "=r"(result) : "r"(v), "n"(mask));
  return result;
}

template <u32 mask> __device__ __forceinline__ u32 select(u32 inside, u32 outside) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(result) : "r"(inside), "r"(outside), "n"(mask));
  return result;
}

// Both halves, each twice; the multiplication then takes them from where they are.
__device__ __forceinline__ void twice(u32 pair, u32& low, u32& high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; mov.b32 %0, {l, l}; mov.b32 %1, {h, h};}" : "=r"(low), "=r"(high) : "r"(pair));
}

// The launch may begin while the kernel before it runs; what that one wrote is there after this.
__device__ __forceinline__ void await_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// From here on in all blocks the launch after this one may begin. Earlier it would take their place on the multiprocessors.
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif  // otherwise a test defines these for a CPU

// Two E4M3 bytes as BF16 numbers, times 2^116: their bits are the numbers times 2^-120, subnormal ones included.
__device__ __forceinline__ u32 scales_of(u32 bytes) {
  return times(times(__byte_perm(bytes, 0, 0x4140) << 4, SHIFT), SHIFT);
}

// The codes at bits 4 r of both halves of a word as BF16 numbers, times 2^-126: sign, lowest exponent bits, highest
// mantissa bit. ``even`` and ``odd`` are the signs at bits 3 and 11, 7 and 15 of each half: of the two that come along
// one ends where the magnitude is put.
template <int r> __device__ __forceinline__ u32 codes(u32 word, u32 even, u32 odd) {
  u32 magnitude = r == 0 ? word << 6 : r == 1 ? word << 2 : r == 2 ? word >> 2 : word >> 6;
  u32 sign = r == 0 ? even << 12 : r == 1 ? odd << 8 : r == 2 ? even << 4 : odd;
  return select<0x01C001C0u>(magnitude, sign);
}

__device__ __forceinline__ uint4 eight(const uint4* p, bool valid) { return valid ? *p : uint4{0, 0, 0, 0}; }

struct Tile { uint4 words; u32 scales, x0, x1; };

// x is not __restrict__: what is known to be constant may be loaded before await_inputs().
extern "C" __global__ void __launch_bounds__(256, RESIDENT) decode_linear(
    const unsigned short* x, const uint4* __restrict__ weight, const unsigned short* __restrict__ scales,
    const unsigned short* __restrict__ bias, float* __restrict__ y, const unsigned short* __restrict__ a,
    float* z, u32* arrived, int tokens, int inputs, int outputs, int units, int shares, int columns, int z_blocks,
    float factor) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0, 32);  // the same for all its lanes: the compiler knows
  const int blocks = outputs / 128, tiles = inputs / 16;

  __shared__ float sums[4][TOKENS][130];
  if (blockIdx.x < z_blocks) {
    await_inputs();
    start_next();
    // A x: warps share strips of 16 columns, several share the inputs of one strip. A lane multiplies 8 inputs that lie in
    // a row; mma counts them in another order, the same for both.
    const int strips = (columns + 15) / 16, subs = strips > 4 ? 1 : strips > 2 ? 2 : 4, per = 8 / subs, sub = warp / per;
    const int part = blockIdx.x * subs + sub, parts = z_blocks * subs, groups = inputs / 32, size = tokens * columns;
    const int begin = (long long)groups * part / parts, end = (long long)groups * (part + 1) / parts;
    float* own = z + (size_t)(1 + blockIdx.x) * size;  // the first is for the sum, by the block that is ready last
    for (int strip = warp % per; strip < strips; strip += per) {
      float c[4] = {};
      const int row = strip * 16 + g;
      const uint4* low = reinterpret_cast<const uint4*>(a + (size_t)row * inputs) + q;
      const uint4* high = low + inputs;
      const uint4* at = reinterpret_cast<const uint4*>(x + (size_t)g * inputs) + q;
#pragma unroll 4
      for (int t = begin; t < end; ++t) {
        const uint4 above = eight(low + 4 * t, row < columns), below = eight(high + 4 * t, row + 8 < columns);
        const uint4 by = eight(at + 4 * t, g < tokens);
        mma(c, above.x, below.x, above.y, below.y, by.x, by.y);
        mma(c, above.z, below.z, above.w, below.w, by.z, by.w);
      }
      for (int i = 0; i < 4; ++i) {
        const int token = 2 * q + (i & 1), column = row + 8 * (i >> 1);
        if (subs > 1)
          sums[sub][token][column] = c[i];  // at most 64 columns
        else if (token < tokens && column < columns)
          own[token * columns + column] = c[i];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; subs > 1 && i < size; i += 256) {
      float sum = 0;
      for (int k = 0; k < subs; ++k) sum += sums[k][i / columns][i % columns];
      own[i] = sum;
    }
    __threadfence();
    __syncthreads();
    __shared__ bool last;
    if (threadIdx.x == 0) last = atomicInc(arrived, z_blocks - 1) == z_blocks - 1;  // and it is 0 again
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = threadIdx.x; i < size; i += 256) {
      float sum = 0;
#pragma unroll 8
      for (int k = 1; k <= z_blocks; ++k) sum += __ldcg(z + k * size + i);
      z[i] = sum;
    }
    return;
  }

  // Tiles of all outputs in a row, of which this block has ``units``.
  int begin = (blockIdx.x - z_blocks) * units;
  const int end = min(begin + units, blocks * tiles), half = warp & 1, first = warp >> 1;
  const int row = g < tokens ? g : 0;  // what is computed for more tokens is not stored
  const uint4* words;
  const unsigned short *bytes, *at;
  int count;  // tiles of the outputs at hand
  Tile tile[DEPTH];

  auto load_weights = [&](Tile& to) {
    to.words = __ldcs(words);
    to.scales = __ldcs(bytes);  // of the outputs g and g + 8 of word q: the other lanes have the others'
    words += 2 * outputs;
    bytes += 2 * outputs;
  };
  auto load_x = [&](Tile& to) {
    to.x0 = *reinterpret_cast<const u32*>(at);
    to.x1 = *reinterpret_cast<const u32*>(at + 8);
    at += 64;
  };
  auto start = [&] {  // at tile ``begin``
    const int block = begin / tiles, t = begin % tiles + first;
    words = weight + (size_t)t * (outputs / 2) + (2 * block + half) * 32 + lane;
    bytes = scales + (size_t)t * (outputs / 2) + (2 * block + half) * 32 + lane;
    at = x + (size_t)row * inputs + 16 * t + 2 * q;
    count = min(end, (block + 1) * tiles) - begin;
#pragma unroll
    for (int i = 0; i < DEPTH; ++i)
      if (first + 4 * i < count) load_weights(tile[i]);
  };
  auto start_x = [&] {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i)
      if (first + 4 * i < count) load_x(tile[i]);
  };

  start();  // nobody writes weights
  await_inputs();
  start_x();
  while (begin < end) {
    const int block = begin / tiles, now = count;
    float c[4][4] = {};
    auto multiply = [&](const Tile& by) {
      const u32 word[4] = {by.words.x, by.words.y, by.words.z, by.words.w}, own = scales_of(by.scales);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 even = masked<0x08080808u>(word[j]), odd = masked<0x80808080u>(word[j]);
        u32 low, high;
        twice(__shfl_sync(0xFFFFFFFFu, own, j, 4), low, high);
        const u32 a0 = times(codes<0>(word[j], even, odd), low), a2 = times(codes<1>(word[j], even, odd), low);
        const u32 a1 = times(codes<2>(word[j], even, odd), high), a3 = times(codes<3>(word[j], even, odd), high);
        mma(c[j], a0, a1, a2, a3, by.x0, by.x1);
      }
    };
    int t = first;
    for (; t + 8 * DEPTH - 4 < now; t += 4 * DEPTH) {  // all of the next tiles exist
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        multiply(tile[i]);
        load_weights(tile[i]);
        load_x(tile[i]);
      }
    }
    for (; t < now; t += 4 * DEPTH) {
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        if (t + 4 * i >= now) break;
        multiply(tile[i]);
        if (t + 4 * (i + DEPTH) < now) {
          load_weights(tile[i]);
          load_x(tile[i]);
        }
      }
    }
    if (begin + now >= end) start_next();
    const int place = blockIdx.x - z_blocks - block * tiles / units;  // among the blocks that share these outputs
    const bool last = begin + now == (block + 1) * tiles;
    begin += now;
    if (begin < end) {
      start();
      start_x();
    }

    __syncthreads();  // the sums of the outputs before have been read
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[first][2 * q + (i & 1)][64 * half + 16 * j + g + 8 * (i >> 1)] = c[j][i];
    __syncthreads();
    for (int i = threadIdx.x; i < 128 * tokens; i += 256) {
      const int token = i / 128, column = i % 128, output = 128 * block + column;
      float sum = sums[0][token][column] + sums[1][token][column] + sums[2][token][column] + sums[3][token][column];
      sum *= factor;
      if (bias != nullptr && place == 0) sum += __uint_as_float((u32)bias[output] << 16);
      y[((size_t)place * tokens + token) * outputs + output] = sum;
      for (int k = place + 1; last && k < shares; ++k) y[((size_t)k * tokens + token) * outputs + output] = 0;
    }
  }
}
