// Hopper's asynchronous units on the CPU, as late as the programming model allows: a bulk tensor load lands when
// somebody waits for it, a bulk tensor store and a wgmma read their shared memory when they are waited for. A
// stage that is handed back or a box that is overwritten too early therefore gives wrong numbers.

#include <initializer_list>

// 128 bytes at most: the host reserves no more.
struct CUtensorMap {
  int32_t rank, bytes;  // dimensions, bytes of an element
  char* data;
  int64_t extent[5], stride[5];  // stride in bytes
  int16_t box[5], step[5];  // the box holds every `step`-th element
  int32_t tf32;  // elements are rounded to 10 bits of mantissa
};
typedef CUtensorMap TensorMap;

// ---- shared memory by 32-bit address

static char* shared_base() { return (char*)dynamic_shared().raw; }
static uint32_t __cvta_generic_to_shared(const void* p) { return (uint32_t)((const char*)p - shared_base()); }
static char* shared_at(uint32_t address, int size) {
  char* p = shared_base() + address;
  check(p, size, size);
  return p;
}
// 128-byte swizzle: 16-byte pieces of a row change places by the row's number in its group of eight; in rows of 64
// bytes (`mask` 0x30) by that of the pair of rows in its group of four.
static uint32_t swizzled(uint32_t address, uint32_t mask = 0x70) { return address ^ (address >> 3 & mask); }

// ---- barriers

void barrier_init(uint32_t address, int count);
void barrier_arrive(uint32_t address, int count);
void barrier_arrive_expect(uint32_t address, int bytes);
void barrier_wait(const void* p, int parity);
void named_barrier(int id, int threads);
void named_barrier_arrive(int id, int threads);

// ---- the tensor memory accelerator

// A block of the cluster may reach another's memory by an address with the rank above the place.
static uint32_t tvmf_place_in(void* p, int rank) { return (uint32_t)(rank + 1) << 20 | __cvta_generic_to_shared(p); }
void tvmf_send_to(uint32_t address, float a, float b, float c, float d, uint32_t barrier);
void tvmf_arrive_at(void* p, int rank);
void tensor_load(uint32_t target, const void* map, const int* at, int rank, uint32_t barrier, int blocks = 0);
void tensor_store(const void* map, const int* at, int rank, uint32_t source);
void store_commit();
void store_wait(size_t left);

// ---- wgmma: a thread computes the accumulators it holds

enum Kind { HALF, BRAIN, E4M3, E5M2, TF32 };
float from_table(bool brain, uint16_t bits);
void multiply(std::initializer_list<float*> sums, uint64_t a, uint64_t b, int n, bool keep, bool ta, bool tb, int terms,
              Kind ka, Kind kb);
void multiply_registers(std::initializer_list<float*> sums, std::initializer_list<uint32_t> a, uint64_t b, int n, bool keep,
                        bool tb, Kind ka, Kind kb);
void multiply_commit();
void multiply_wait(size_t left);

// ---- votes

static uint __ballot_sync(unsigned, int predicate) {
  uint found = 0;
  for (int lane = 0; lane < 32; lane++) found |= (exchange(predicate, lane) != 0) * 1u << lane;
  return found;
}
static int __ffs(int x) { return __builtin_ffs(x); }

// ---- matrices of 8 x 8 halves between registers and shared memory

uint32_t* warp_rows(uint32_t own);
template <bool store> static void move_matrices(uint32_t own, uint32_t* words) {
  uint32_t* rows = warp_rows(own);
  int lane = current->linear % 32;
  for (int i = 0; i < 4; i++) {
    char* place = shared_at(rows[i * 8 + lane / 4] + lane % 4 * 4, 4);
    if (store) memcpy(place, &words[i], 4);
    else memcpy(&words[i], place, 4);
  }
  __syncwarp();
}

// ---- names of the generated code

#define tvm_builtin_cuda_mbarrier_wait barrier_wait
#define tvm_builtin_cuda_mbarrier_wait_acquire_cluster barrier_wait
typedef uint __half2;
static float __low2float(uint u) { return from_table(false, u & 0xffff); }
static float __high2float(uint u) { return from_table(false, u >> 16); }
static float __uint_as_float(uint u) { float f; memcpy(&f, &u, 4); return f; }
static void ptx_wgmma_encode_matrix_descriptor(uint64_t* d, void* p, int leading, int stride, int swizzle) {
  uint64_t kind = swizzle == 3 ? 1 : swizzle == 2 ? 2 : 0;
  *d = (__cvta_generic_to_shared(p) >> 4 & 0x3fff) | (uint64_t)leading << 16 | (uint64_t)stride << 32 | kind << 62;
}
