// A CUDA device on the CPU: every thread of a cluster is a fiber, barriers are yields, and every access
// through a kernel parameter or to shared memory is checked for bounds and alignment.
//
// This is what a kernel sees of it, and includes little, since it is read for each kernel; the rest is in
// device.cpp, which is compiled once.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__ static
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __restrict__
#define __align__(n) alignas(n)
#define CUDART_INF_F INFINITY
#define CUDART_INF ((double)INFINITY)
#define CUDART_NAN ((double)NAN)
#define CUDART_NAN_F NAN
typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;

// ---- number types

typedef _Float16 half;
struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  nv_bfloat16(float value) {
    uint32_t u;
    memcpy(&u, &value, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) bits = 0x7fff;
    else bits = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t u = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &u, 4);
    return value;
  }
};
// An 8-bit float of M bits of mantissa; rounds to nearest even and saturates, NaN stays NaN.
template <int M, int BIAS, int LARGEST> struct Float8 {
  uint8_t bits;
  Float8() = default;
  Float8(float value) {
    uint8_t sign = std::signbit(value) ? 0x80 : 0;
    float size = fabsf(value);
    if (std::isnan(value)) { bits = 0x7f; return; }
    int exponent = size > 0 ? std::max((int)std::ilogb(size), 1 - BIAS) : 1 - BIAS;
    float steps = size > 1e6f ? 1e9f : nearbyintf(ldexpf(size, M - exponent));
    if (steps >= (2 << M)) steps /= 2, exponent++;
    int code = steps < (1 << M) ? (int)steps : ((exponent + BIAS) << M) + (int)std::min(steps, 1e4f) - (1 << M);
    bits = sign | (uint8_t)std::min(size > 1e6f ? LARGEST : code, LARGEST);
  }
  operator float() const {
    int code = bits & 0x7f, exponent = code >> M, steps = code & ((1 << M) - 1);
    float size = exponent ? ldexpf(steps + (1 << M), exponent - BIAS - M) : ldexpf(steps, 1 - BIAS - M);
    if (code > LARGEST) size = M == 2 && steps == 0 ? INFINITY : NAN;
    return bits & 0x80 ? -size : size;
  }
};
typedef Float8<3, 7, 0x7e> __nv_fp8_e4m3;
typedef Float8<2, 15, 0x7b> __nv_fp8_e5m2;
#define VECTOR2(name, T) struct alignas(2 * sizeof(T)) name { T x, y; }; \
  static inline name make_##name(T x, T y) { return {x, y}; }
#define VECTOR4(name, T) struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) name { T x, y, z, w; }; \
  static inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR2(float2, float) VECTOR4(float4, float) VECTOR2(int2, int) VECTOR4(int4, int)
VECTOR2(uint2, uint) VECTOR4(uint4, uint) VECTOR2(half2, half) VECTOR4(half4, half)
VECTOR2(nv_bfloat162, nv_bfloat16) VECTOR4(nv_bfloat164, nv_bfloat16) VECTOR2(double2, double)
VECTOR2(longlong2, long long) VECTOR4(longlong4, long long) VECTOR4(double4, double) VECTOR2(short2, short) VECTOR4(short4, short) VECTOR2(char2, signed char)
VECTOR4(char4, signed char) VECTOR2(uchar2, uchar) VECTOR4(uchar4, uchar) VECTOR2(ushort2, ushort)
VECTOR4(ushort4, ushort)
static inline float __half2float(half x) { return (float)x; }
static inline half __float2half_rn(float x) { return (half)x; }
static inline half __float2half(float x) { return (half)x; }
static inline float __bfloat162float(nv_bfloat16 x) { return x; }
static inline nv_bfloat16 __float2bfloat16(float x) { return x; }
static inline nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
static inline float2 __half22float2(half2 h) { return {(float)h.x, (float)h.y}; }
static inline half2 __floats2half2_rn(float a, float b) { return {(half)a, (half)b}; }

// ---- math

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float __fdividef(float a, float b) { return a / b; }
#define __sinf sinf
#define __cosf cosf
#define __expf expf
#define __logf logf
#define __tanf tanf
#define __powf powf
template <class A, class B> static inline auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }
template <class A, class B> static inline auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }

// ---- threads

struct Dim { unsigned x, y, z; };
struct Slot { long long words[2]; };
struct Block;
struct Fiber {
  Dim thread, block;
  int linear;
  unsigned rank;
  Block* home;
  bool waits_yet;  // a thread of a kernel that is launched early, in front of its wait
};
extern Fiber* current;
extern Dim block_dim, grid_dim;
extern int threads_per_block, cluster_size;
extern long long switches_without_progress;
void fail(const char* what);
void yield_fiber();
#define threadIdx (current->thread)
#define blockIdx (current->block)
#define blockDim block_dim
#define gridDim grid_dim
void __syncwarp(unsigned = 0xffffffffu);
void __syncthreads();
Slot* exchange_slots();
static void tvm_builtin_cuda_cta_sync() { __syncthreads(); }
template <class T> static T exchange(T value, int source) {
  Slot* slots = exchange_slots();
  memcpy(&slots[current->linear], &value, sizeof(T));
  __syncwarp();
  T result;
  memcpy(&result, &slots[current->linear / 32 * 32 + source], sizeof(T));
  __syncwarp();
  return result;
}
template <class T> static T __shfl_xor_sync(unsigned, T v, int mask, int = 32) {
  return exchange(v, (current->linear % 32) ^ mask);
}
template <class T> static T __shfl_sync(unsigned, T v, int lane, int width = 32) {
  int own = current->linear % 32;
  return exchange(v, own / width * width + lane % width);
}
template <class T> static T __shfl_down_sync(unsigned, T v, int delta, int width = 32) {
  int own = current->linear % 32, to = own + delta;
  return exchange(v, to / width == own / width ? to : own);
}
template <class T> static T __shfl_up_sync(unsigned, T v, int delta, int width = 32) {
  int own = current->linear % 32, to = own - delta;
  return exchange(v, to >= own / width * width ? to : own);
}
static int __reduce_min_sync(unsigned, int v) {
  int found = v;
  for (int lane = 0; lane < 32; lane++) found = std::min(found, exchange(v, lane));
  return found;
}
static int __reduce_max_sync(unsigned mask, int v) { return ~__reduce_min_sync(mask, ~v); }
template <class T> static T __ldg(const T* p) { return *p; }
template <class T> static T atomicAdd(T* p, T v) { T old = *p; *p = old + v; return old; }

// ---- memory

// Accesses of watched memory are counted, but for those that only take an address.
void check(const void* p, size_t size, size_t alignment, bool counted = true);
// Pointer to global or shared memory: every dereference and every cast to another width is checked.
template <class T> struct Pointer {
  T* raw;
  Pointer(T* p = nullptr) : raw(p) {}
  T& operator[](long long i) const { check(raw + i, sizeof(T), alignof(T)); return raw[i]; }
  T& operator*() const { return (*this)[0]; }
  T* at(long long i) const { check(raw + i, sizeof(T), alignof(T), false); return raw + i; }
  Pointer operator+(long long i) const { return Pointer(raw + i); }
  template <class U> explicit operator U*() const {
    if constexpr (!std::is_void<U>::value) check(raw, sizeof(U), alignof(U));
    return (U*)raw;
  }
};
void* shared_memory(int id, long long bytes, int alignment);
void* dynamic_memory();
template <class T> static Pointer<T> shared_array(int id, long long n, int alignment) {
  return Pointer<T>((T*)shared_memory(id, n * sizeof(T), alignment));
}
static Pointer<uchar> dynamic_shared() { return Pointer<uchar>((uchar*)dynamic_memory()); }

// ---- stand-ins for device functions that are written in PTX

// Early launches: in front of its wait a thread reads what it loads ahead, and writes nothing.
static void begin_early() { current->waits_yet = true; }
static void tvmf_wait_for_kernels_before() { current->waits_yet = false; }
template <class T> static void tvmf_behind_wait(T&) {
  if (current->waits_yet) fail("an address is made anew in front of the wait");
}

template <int N> static void copy(void* d, const void* s, bool global_source, bool global_target) {
  if (global_source) check(s, N, N);
  if (global_target) check(d, N, N);
  memcpy(d, s, N);
}
template <int N> static void load_ahead(void* d, const void* s) {
  bool waits_yet = current->waits_yet;
  current->waits_yet = false;
  copy<N>(d, s, true, false);
  current->waits_yet = waits_yet;
}
#define COPIES(N) \
  static void tvmf_load##N##_nc(void* d, const void* s) { copy<N>(d, s, true, false); } \
  static void tvmf_load##N##_fresh(void* d, const void* s) { copy<N>(d, s, true, false); } \
  static void tvmf_load##N##_cs(void* d, const void* s) { copy<N>(d, s, true, false); } \
  static void tvmf_load##N##_na(void* d, const void* s) { copy<N>(d, s, true, false); } \
  static void tvmf_load##N##_ahead(void* d, const void* s) { load_ahead<N>(d, s); } \
  static void tvmf_load##N##_again(void* d, const void* s) { copy<N>(d, s, true, false); } \
  static void tvmf_load##N##_behind(void* d, const void* s, int offset) { copy<N>(d, (const char*)s + offset, true, false); } \
  static void tvmf_store##N##_wb(void* d, const void* s) { copy<N>(d, s, false, true); } \
  static void tvmf_store##N##_cs(void* d, const void* s) { copy<N>(d, s, false, true); } \
  static void tvmf_move##N(void* d, const void* s) { copy<N>(d, s, false, false); }
COPIES(1) COPIES(2) COPIES(4) COPIES(8) COPIES(16)
template <class T> static T max_nan(T a, T b) { return (float)a != (float)a ? a : b > a || (float)b != (float)b ? b : a; }
template <class T> static T min_nan(T a, T b) { return (float)a != (float)a ? a : b < a || (float)b != (float)b ? b : a; }
static float tvmf_max_nan(float a, float b) { return max_nan(a, b); }
static float tvmf_min_nan(float a, float b) { return min_nan(a, b); }
template <class T> static T __hmax_nan(T a, T b) { return max_nan(a, b); }
template <class T> static T __hmin_nan(T a, T b) { return min_nan(a, b); }
static float tvmf_ex2(float x) { return exp2f(x); }
static float tvmf_rcp(float x) { return 1.0f / x; }
static float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
static float __int_as_float(int x) { float r; memcpy(&r, &x, 4); return r; }
static int __float2int_rn(float x) { return std::isnan(x) ? 0 : (int)fmin(fmax(nearbyint((double)x), -2147483648.0), 2147483647.0); }
static int __float_as_int(float x) { int r; memcpy(&r, &x, 4); return r; }
static double __longlong_as_double(long long x) { double r; memcpy(&r, &x, 8); return r; }
static unsigned tvmf_load_word(const void* p) { return *(const unsigned*)p; }
static void tvmf_load_four(const void* p, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
  check(p, 16, 16);
  const unsigned* words = (const unsigned*)p;
  a = words[0], b = words[1], c = words[2], d = words[3];
}
template <typename T> static void load_two(const void* p, T& a, T& b) {
  check(p, 2 * sizeof(T), 2 * sizeof(T));
  memcpy(&a, p, sizeof(T));
  memcpy(&b, (const char*)p + sizeof(T), sizeof(T));
}
static void tvmf_load_two_float32(const void* p, float& a, float& b) { load_two(p, a, b); }
static void tvmf_load_two_int32(const void* p, int& a, int& b) { load_two(p, a, b); }
static void tvmf_load_two_int64(const void* p, int64_t& a, int64_t& b) { load_two(p, a, b); }
static uint tvmf_load_bytes(const void* p) {
  uint16_t u;
  check(p, 2, 2);
  memcpy(&u, p, 2);
  return u;
}
static float tvmf_clamp(float x, float bound) { return x < -bound ? -bound : x > bound ? bound : x; }
static uint tvmf_pack_f16x2(float low, float high) {
  half h[2] = {(half)low, (half)high};
  uint r;
  memcpy(&r, h, 4);
  return r;
}
static uint tvmf_pack_bf16x2(float low, float high) {
  return (uint)nv_bfloat16(low).bits | (uint)nv_bfloat16(high).bits << 16;
}
template <class T> static uint pack_four(float a, float b, float c, float d) {
  return T(a).bits | T(b).bits << 8 | T(c).bits << 16 | (uint)T(d).bits << 24;
}
static uint tvmf_pack_e4m3x2(float a, float b, float c, float d) { return pack_four<__nv_fp8_e4m3>(a, b, c, d); }
static uint tvmf_pack_e5m2x2(float a, float b, float c, float d) { return pack_four<__nv_fp8_e5m2>(a, b, c, d); }
static uint __byte_perm(uint a, uint b, uint selectors) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  uint r = 0;
  for (int i = 0; i < 4; i++) r |= (uint)(bytes >> 8 * (selectors >> 4 * i & 7) & 0xff) << 8 * i;
  return r;
}
template <class F> static uint two_halves(uint a, uint b, uint c, F f) {
  half x[2], y[2], z[2], r[2];
  uint result;
  memcpy(x, &a, 4), memcpy(y, &b, 4), memcpy(z, &c, 4);
  for (int i = 0; i < 2; i++) r[i] = (half)f((double)x[i], (double)y[i], (double)z[i]);
  memcpy(&result, r, 4);
  return result;
}
void tvmf_ring_copy(void* d, const void* s);
void tvmf_ring_commit();
void ring_wait(size_t newer);
#define RING_WAIT(n) static void tvmf_ring_wait##n() { ring_wait(n); }
RING_WAIT(0) RING_WAIT(1) RING_WAIT(2) RING_WAIT(3) RING_WAIT(5) RING_WAIT(7)
static uint tvmf_masked(uint word, uint mask, uint flipped) { return (word & mask) ^ flipped; }
static uint tvmf_half_fma(uint a, uint b, uint c) { return two_halves(a, b, c, [](double x, double y, double z) { return x * y + z; }); }
static uint tvmf_half_add(uint a, uint b) { return two_halves(a, b, 0, [](double x, double y, double) { return x + y; }); }
static uint tvmf_half_mul(uint a, uint b) { return two_halves(a, b, 0, [](double x, double y, double) { return x * y; }); }
// mma.m16n8k16: thread 4 g + t has row g (and g + 8) of A, column g of B, and columns 2 t, 2 t + 1 of the sums.
struct Fragments { uint words[32][6]; };
Fragments& warp_fragments();
template <class T> static void emulate_mma(float* d, const uint (&words)[6]) {
  int lane = current->linear % 32, g = lane / 4, t = lane % 4;
  Fragments& all = warp_fragments();
  memcpy(all.words[lane], words, sizeof(words));
  __syncwarp();
  auto half_of = [&](int from, int word, int i) { T h[2]; memcpy(h, &all.words[from][word], 4); return (float)h[i]; };
  for (int e = 0; e < 4; e++)
    for (int k = 0; k < 16; k++) {
      int row = g, column = 2 * t + e % 2, part = k / 8, from = k % 8 / 2;
      d[e] += half_of(row * 4 + from, 2 * part + e / 2, k % 2) * half_of(column * 4 + from, 4 + part, k % 2);
    }
  __syncwarp();
}
#define MMA(kind, T) static void tvmf_skinny_mma_##kind(float* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) { \
  emulate_mma<T>(d, {a0, a1, a2, a3, b0, b1}); }
MMA(f16, half) MMA(bf16, nv_bfloat16)
static int tvm_builtin_cluster_ctaid_x() { return current->rank; }
static void tvmf_cluster_arrive() {}
void tvmf_cluster_sync();
static void tvm_builtin_cuda_grid_sync() { tvmf_cluster_sync(); }  // the grid is one cluster
static void tvmf_cluster_wait() { tvmf_cluster_sync(); }
void tvmf_cluster_store(void* p, float v, int rank);
struct Transfer { int phase, pending; };
static void tvmf_barrier_init(void* p) { *(Transfer*)p = {0, 0}; }
static void tvmf_barrier_fence() {}
static void tvmf_barrier_expect(void* p, unsigned bytes) { ((Transfer*)p)->pending += bytes; }
static void tvmf_barrier_wait(void* p, int parity) {
  while ((((volatile Transfer*)p)->phase & 1) == parity) yield_fiber();
}
void tvmf_bulk_copy(void* d, const void* s, unsigned bytes, void* b);
