// Runs a kernel of decode_linear.cu on a CPU: 256 threads a block, which meet at every product of a warp.
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
struct alignas(16) uint4 { uint32_t x, y, z, w; };
template <typename T> T __ldcs(const T* p) { return *p; }
template <typename T> T __ldcg(const T* p) { return *p; }
inline void __threadfence() {}
inline uint32_t atomicInc(uint32_t* p, uint32_t most) {  // one block at a time
  const uint32_t before = *p;
  *p = before >= most ? 0 : before + 1;
  return before;
}
struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
static std::unique_ptr<std::barrier<>> all, warps[8];
inline void __syncthreads() { all->arrive_and_wait(); }

inline float __uint_as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t bits_of(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }
inline float low(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
inline uint32_t bf16(float f) { uint32_t b = bits_of(f); return (b + 0x7FFF + (b >> 16 & 1)) >> 16; }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  uint64_t both = (uint64_t)y << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
}
inline uint32_t times(uint32_t a, uint32_t b) { return bf16(low(a) * low(b)) | bf16(high(a) * high(b)) << 16; }

template <uint32_t mask> uint32_t masked(uint32_t v) { return v & mask; }
template <uint32_t mask> uint32_t select(uint32_t inside, uint32_t outside) { return (inside & mask) | (outside & ~mask); }
inline void twice(uint32_t pair, uint32_t& low, uint32_t& high) {
  low = pair << 16 | (pair & 0xFFFF);
  high = (pair & 0xFFFF0000u) | pair >> 16;
}

using std::min;
inline void await_inputs() {}
inline void start_next() {}

inline uint32_t __shfl_sync(uint32_t, uint32_t v, int from, int width) {
  static uint32_t values[8][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  values[warp][lane] = v;
  warps[warp]->arrive_and_wait();
  const uint32_t found = values[warp][lane / width * width + from];
  warps[warp]->arrive_and_wait();
  return found;
}

static uint32_t left[8][32][4], right[8][32][2];
inline void mma(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  std::memcpy(left[warp][lane], a, sizeof a);
  std::memcpy(right[warp][lane], b, sizeof b);
  warps[warp]->arrive_and_wait();
  for (int i = 0; i < 4; ++i) {  // rows g and g + 8, columns 2 q and 2 q + 1: fragments as PTX defines them
    const int row = g + 8 * (i >> 1), column = 2 * q + (i & 1);
    for (int k = 0; k < 16; ++k) {
      const uint32_t pa = left[warp][4 * (row % 8) + k % 8 / 2][(row >= 8) + 2 * (k >= 8)];
      const uint32_t pb = right[warp][4 * column + k % 8 / 2][k >= 8];
      c[i] += (k & 1 ? high(pa) : low(pa)) * (k & 1 ? high(pb) : low(pb));
    }
  }
  warps[warp]->arrive_and_wait();
}

#include KERNEL

extern "C" void run(const void* x, const void* weight, const void* scales, const void* bias, float* y, const void* a,
                    float* z, void* arrived, int tokens, int inputs, int outputs, int units, int shares, int columns, int z_blocks,
                    float factor) {
  all = std::make_unique<std::barrier<>>(256);
  for (auto& warp : warps) warp = std::make_unique<std::barrier<>>(32);
  const int tiles = outputs / 128 * (inputs / 16);
  for (int block = (tiles + units - 1) / units + z_blocks; block-- > 0;) {  // none may rely on the order
    std::vector<std::thread> threads;
    for (int i = 0; i < 256; ++i)
      threads.emplace_back([=] {
        threadIdx.x = i;
        blockIdx.x = block;
        decode_linear((const unsigned short*)x, (const uint4*)weight, (const unsigned short*)scales,
                      (const unsigned short*)bias, y, (const unsigned short*)a, z, (uint32_t*)arrived, tokens,
                      inputs, outputs, units, shares, columns, z_blocks, factor);
      });
    for (auto& thread : threads) thread.join();
  }
}
