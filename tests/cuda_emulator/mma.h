// cp.async, ldmatrix and mma.sync on the CPU. A copy lands as late as the programming model allows: when its
// thread waits for its group. A warp's threads exchange fragments through a table, as its hardware does.

void async_copy(void* d, const void* s, long long at, int size, int count);
#define ASYNC_COPIES(N) \
  static void tvmf_async##N(void* d, const void* s, long long at) { async_copy(d, s, at, N, N); } \
  static void tvmf_async##N##_if(void* d, const void* s, long long at, int n) { async_copy(d, s, at, N, n); }
ASYNC_COPIES(4) ASYNC_COPIES(8) ASYNC_COPIES(16)
void tvmf_async_commit();
void async_land(size_t left);
static void tvmf_async_wait0() { async_land(0); }
static void tvmf_async_wait1() { async_land(1); }
static void tvmf_async_wait2() { async_land(2); }
static void tvmf_async_wait3() { async_land(3); }
static void tvmf_async_wait4() { async_land(4); }
static void tvmf_async_wait6() { async_land(6); }
static void tvmf_async_wait14() { async_land(14); }

static void tvmf_load_pair(void* d, const void* s, long long at, long long end, int valid) {
  long long low = at & ~15LL;
  memset(d, 0, 32);
  for (int i = 0; i < 2; i++) {
    if (low + 16 * i + 16 > end || valid <= (i ? 16 - (at & 15) : 0)) continue;
    check((const char*)s + low + 16 * i, 16, 16);
    memcpy((char*)d + 16 * i, (const char*)s + low + 16 * i, 16);
  }
}
static void tvmf_load_pair_far(void* d, const void* s, long long at, long long end, int valid) {
  tvmf_load_pair(d, s, at, end, valid);
}

#define LOAD_IF(N, T) \
  static void tvmf_load_if##N##_far(void* d, const void* s, long long at, int mask, int bits) { \
    memset(d, 0, N); \
    if ((mask & bits) != bits) return; \
    check((const T*)s + at, N, N); \
    memcpy(d, (const T*)s + at, N); \
  } \
  static void tvmf_load_if##N(void* d, const void* s, int at, int mask, int bits) { \
    tvmf_load_if##N##_far(d, s, at, mask, bits); \
  }
LOAD_IF(1, uint8_t) LOAD_IF(2, uint16_t) LOAD_IF(4, uint32_t)

// What each thread of a warp shows to the others; two tables take turns, so one barrier an exchange is enough.
struct Shown { const void* place; uint32_t words[6]; };
Shown* show(const Shown& own);
static void take_matrices(void* d, const void* s, bool transposed) {
  check(s, 16, 16);
  Shown* table = show({s, {}});
  int lane = current->linear % 32;
  uint16_t* out = (uint16_t*)d;
  for (int i = 0; i < 4; i++)
    for (int v = 0; v < 2; v++) {
      int row = transposed ? lane % 4 * 2 + v : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + v;
      memcpy(&out[i * 2 + v], (const char*)table[i * 8 + row].place + column * 2, 2);
    }
}
static int __any_sync(unsigned, int predicate) {
  int found = 0;
  for (int lane = 0; lane < 32; lane++) found |= exchange(predicate, lane);
  return found != 0;
}
static void tvmf_matrices(void* d, const void* s) { take_matrices(d, s, false); }
static void tvmf_matrices_trans(void* d, const void* s) { take_matrices(d, s, true); }

// Element number `i` of a 32-bit register.
template <class T> static double mma_element(uint32_t word, int i) {
  T value;
  memcpy(&value, (const char*)&word + i * sizeof(T), sizeof(T));
  return (double)(std::conditional_t<std::is_integral<T>::value, int, float>)value;
}
template <> double mma_element<nv_bfloat16>(uint32_t word, int i) {
  nv_bfloat16 value;
  value.bits = (uint16_t)(word >> 16 * i);
  return (float)value;
}
struct Tf32 { uint32_t bits; operator float() const { uint32_t cut = bits & 0xffffe000u; float f; memcpy(&f, &cut, 4); return f; } };
template <class A, class B, class S> static void mma(void* d, const void* a, const void* b) {
  Shown own{nullptr, {}};
  memcpy(own.words, a, 16);
  memcpy(own.words + 4, b, 8);
  Shown* table = show(own);
  const int each = 4 / sizeof(A);
  int lane = current->linear % 32;
  for (int h = 0; h < 2; h++)
    for (int v = 0; v < 2; v++) {
      double total = 0;
      for (int t = 0; t < 4; t++)
        for (int half = 0; half < 2; half++)
          for (int e = 0; e < each; e++)
            total += mma_element<A>(table[lane / 4 * 4 + t].words[half * 2 + h], e) *
                     mma_element<B>(table[(lane % 4 * 2 + v) * 4 + t].words[4 + half], e);
      S* sum = (S*)d + h * 2 + v;
      *sum = (S)(*sum + total);
    }
}
#define MMA(a, b, A, B, S) static void tvmf_mma_##a##_##b(void* d, const void* x, const void* y) { mma<A, B, S>(d, x, y); }
MMA(f16, f16, half, half, float) MMA(bf16, bf16, nv_bfloat16, nv_bfloat16, float) MMA(tf32, tf32, Tf32, Tf32, float)
MMA(s8, s8, signed char, signed char, int) MMA(s8, u8, signed char, uchar, int)
MMA(u8, s8, uchar, signed char, int) MMA(u8, u8, uchar, uchar, int)
MMA(e4m3, e4m3, __nv_fp8_e4m3, __nv_fp8_e4m3, float) MMA(e4m3, e5m2, __nv_fp8_e4m3, __nv_fp8_e5m2, float)
MMA(e5m2, e4m3, __nv_fp8_e5m2, __nv_fp8_e4m3, float) MMA(e5m2, e5m2, __nv_fp8_e5m2, __nv_fp8_e5m2, float)
static void tvmf_round_tf32(void* d) {
  uint32_t& r = *(uint32_t*)d;
  if ((r & 0x7f800000u) != 0x7f800000u) r += 0x1000u;
}
static void tvmf_split_float32(void* h, void* m, void* l, uint32_t x, uint32_t y) {
  uint32_t *high = (uint32_t*)h, *middle = (uint32_t*)m, *low = (uint32_t*)l, pair[2] = {x, y};
  *high = *middle = *low = 0;
  for (int i = 0; i < 2; i++) {
    uint32_t cut = pair[i] & 0xffff0000u;
    float value, first;
    memcpy(&value, &pair[i], 4);
    memcpy(&first, &cut, 4);
    nv_bfloat16 second(value - first), third(value - first - (float)second);
    *high |= cut >> 16 << 16 * i;
    *middle |= (uint32_t)second.bits << 16 * i;
    *low |= (uint32_t)third.bits << 16 * i;
  }
}

// ---- what generated code calls around them; other emulated devices may have functions of these names

static uint32_t __funnelshift_r(uint32_t low, uint32_t high, int shift) {
  return (uint32_t)(((uint64_t)high << 32 | low) >> (shift & 31));
}
typedef uint __half2;
template <class T> static float __low2float(T u) { half h; memcpy(&h, &u, 2); return (float)h; }
template <class T> static float __high2float(T u) { half h; memcpy(&h, (const char*)&u + 2, 2); return (float)h; }
template <class T> static float __uint_as_float(T u) { float f; memcpy(&f, &u, 4); return f; }
