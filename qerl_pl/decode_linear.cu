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

// The launch may begin while the kernel before it ends; what that one wrote is there after this.
__device__ __forceinline__ void await_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif  // otherwise a test defines the three for a CPU

// Two E4M3 bytes as BF16 numbers, times 2^116: their bits are the numbers times 2^-120, subnormal ones included.
__device__ __forceinline__ u32 scales_of(u32 bytes) {
  return times(times(__byte_perm(bytes, 0, 0x4140) << 4, SHIFT), SHIFT);
}

// The codes at bits 4 r of both halves of a word as BF16 numbers, times 2^-126: sign, lowest exponent bits, highest
// mantissa bit.
template <int r> __device__ __forceinline__ u32 codes(u32 word) {
  u32 magnitude = r == 0 ? word << 6 : r == 1 ? word << 2 : r == 2 ? word >> 2 : word >> 6;
  u32 sign = word << (12 - 4 * r);
  return (magnitude & 0x01C001C0u) | (sign & 0x80008000u);
}

__device__ __forceinline__ u32 pair(const unsigned short* p, bool valid) {
  return valid ? *reinterpret_cast<const u32*>(p) : 0u;
}

struct Tile { uint4 words; u32 scales, x0, x1; };

extern "C" __global__ void __launch_bounds__(256, RESIDENT) decode_linear(
    const unsigned short* __restrict__ x, const uint4* __restrict__ weight, const unsigned short* __restrict__ scales,
    const unsigned short* __restrict__ bias, float* __restrict__ y, const unsigned short* __restrict__ a,
    float* __restrict__ z, int tokens, int inputs, int outputs, int units, int shares, int columns, int z_blocks,
    float factor) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  const int blocks = outputs / 128, tiles = inputs / 16;

  __shared__ float sums[4][TOKENS][130];
  if (blockIdx.x < z_blocks) {
    await_inputs();
    // A x: warps share strips of 16 columns, several share the inputs of one strip
    const int strips = (columns + 15) / 16, subs = strips > 4 ? 1 : strips > 2 ? 2 : 4, per = 8 / subs, sub = warp / per;
    const int part = blockIdx.x * subs + sub, parts = z_blocks * subs;
    const int begin = (long long)tiles * part / parts, end = (long long)tiles * (part + 1) / parts;
    for (int strip = warp % per; strip < strips; strip += per) {
      float c[4] = {};
      const int row = strip * 16 + g;
      const unsigned short* low = a + (size_t)row * inputs + 2 * q;
      const unsigned short* high = low + (size_t)8 * inputs;
#pragma unroll 8
      for (int t = begin; t < end; ++t) {
        const int k = 16 * t;
        u32 a0 = pair(low + k, row < columns), a1 = pair(high + k, row + 8 < columns);
        u32 a2 = pair(low + k + 8, row < columns), a3 = pair(high + k + 8, row + 8 < columns);
        const unsigned short* at = x + (size_t)g * inputs + 2 * q + k;
        mma(c, a0, a1, a2, a3, pair(at, g < tokens), pair(at + 8, g < tokens));
      }
      for (int i = 0; i < 4; ++i) {
        const int token = 2 * q + (i & 1), column = row + 8 * (i >> 1);
        if (subs > 1)
          sums[sub][token][column] = c[i];  // at most 64 columns
        else if (token < tokens && column < columns)
          z[((size_t)blockIdx.x * tokens + token) * columns + column] = c[i];
      }
    }
    if (subs == 1) return;
    __syncthreads();
    for (int i = threadIdx.x; i < columns * tokens; i += 256) {
      float sum = 0;
      for (int k = 0; k < subs; ++k) sum += sums[k][i / columns][i % columns];
      z[((size_t)blockIdx.x * tokens + i / columns) * columns + i % columns] = sum;
    }
    return;
  }

  // Tiles of all outputs in a row, of which this block has ``units``.
  int begin = (blockIdx.x - z_blocks) * units;
  const int end = min(begin + units, blocks * tiles), half = warp & 1, first = warp >> 1;
  const int row = g < tokens ? g : 0;  // what is computed for more tokens is not stored
  const uint4* words;
  const unsigned short *bytes, *at, *stop;
  int left;  // tiles from the next one to be loaded on, the other warps' among them
  Tile tile[DEPTH];

  auto load_weights = [&](Tile& to) {
    const bool inside = left > 0;
    to.words = inside ? __ldcs(words) : make_uint4(0, 0, 0, 0);
    to.scales = inside ? __ldcs(bytes) : 0;  // of the outputs g and g + 8 of word q: the other lanes have the others'
    words += 2 * outputs;
    bytes += 2 * outputs;
    left -= 4;
  };
  auto load_x = [&](Tile& to) {
    to.x0 = pair(at, at < stop);
    to.x1 = pair(at + 8, at < stop);
    at += 64;
  };
  auto start = [&] {  // at tile ``begin``
    const int block = begin / tiles, t = begin % tiles + first, until = min(end, (block + 1) * tiles);
    words = weight + (size_t)t * (outputs / 2) + (2 * block + half) * 32 + lane;
    bytes = scales + (size_t)t * (outputs / 2) + (2 * block + half) * 32 + lane;
    at = x + (size_t)row * inputs + 16 * t + 2 * q;
    stop = x + (size_t)row * inputs + 16 * (until - block * tiles);
    left = until - begin - first;
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) load_weights(tile[i]);
  };

  start();  // nobody writes weights
  await_inputs();
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) load_x(tile[i]);
  while (begin < end) {
    const int block = begin / tiles, count = min(end, (block + 1) * tiles) - begin;
    float c[4][4] = {};
    for (int t = first; t < count; t += 4 * DEPTH) {
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        const Tile& now = tile[i];
        const u32 word[4] = {now.words.x, now.words.y, now.words.z, now.words.w}, own = scales_of(now.scales);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const u32 both = __shfl_sync(0xFFFFFFFFu, own, j, 4);
          const u32 s0 = __byte_perm(both, 0, 0x1010), s1 = __byte_perm(both, 0, 0x3232);
          const u32 a0 = times(codes<0>(word[j]), s0), a2 = times(codes<1>(word[j]), s0);
          const u32 a1 = times(codes<2>(word[j]), s1), a3 = times(codes<3>(word[j]), s1);
          mma(c[j], a0, a1, a2, a3, now.x0, now.x1);
        }
        load_weights(tile[i]);
        load_x(tile[i]);
      }
    }
    const int place = blockIdx.x - z_blocks - block * tiles / units;  // among the blocks that share these outputs
    const bool last = begin + count == (block + 1) * tiles;
    begin += count;
    if (begin < end) {
      start();
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) load_x(tile[i]);
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
