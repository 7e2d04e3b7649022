/* Vectors of the length of the processor's registers, since compilers split longer vectors badly.
 * They may be unaligned in memory.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define DOUBLES (LANES / 2)
#define ALONE static inline __attribute__((always_inline))

typedef ptrdiff_t size;
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef double doubles __attribute__((vector_size(8 * DOUBLES), aligned(8), may_alias));
typedef int32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

ALONE lanes load(const float *at) { return *(const lanes *)at; }

ALONE void store(float *at, lanes v) { *(lanes *)at = v; }
