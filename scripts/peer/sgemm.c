// Single-precision products by an installed BLAS or oneDNN, to compare with `train bench gemm`: see gemm.sh.
// Reads lines "layout m n k" (layout NN, NT or TN, matrices row-major, TN adds to C) and prints "layout m n k GFLOP/s", the
// median over the samples of the best of five windows of at least 1 ms, as train bench does.
//
//	cc -O2 sgemm.c -o sgemm -ldl        ./sgemm LIBRARY.so SECONDS < shapes
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void (*cblas_fn)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
typedef int (*dnnl_fn)(char, char, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t, float, float *, int64_t);

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int by_size(const void *a, const void *b) {
	double x = *(double *)a, y = *(double *)b;
	return (x > y) - (x < y);
}

static float *matrix(size_t n) {
	float *p = aligned_alloc(64, (n * 4 + 63) / 64 * 64);
	for (size_t i = 0; i < n; i++)
		p[i] = (float)((i * 2654435761u) >> 8 & 0xffff) / 65536 - 0.5f;
	return p;
}

int main(int argc, char **argv) {
	if (argc != 3) {
		fprintf(stderr, "usage: sgemm LIBRARY.so SECONDS < shapes\n");
		return 2;
	}
	void *lib = dlopen(argv[1], RTLD_NOW);
	if (!lib) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	cblas_fn blas = (cblas_fn)dlsym(lib, "cblas_sgemm");
	dnnl_fn dnnl = (dnnl_fn)dlsym(lib, "dnnl_sgemm");
	if (!blas && !dnnl) {
		fprintf(stderr, "%s has neither cblas_sgemm nor dnnl_sgemm\n", argv[1]);
		return 1;
	}
	double seconds = atof(argv[2]);
	char layout[3];
	int m, n, k;
	while (scanf("%2s %d %d %d", layout, &m, &n, &k) == 4) {
		float *a = matrix((size_t)m * k), *b = matrix((size_t)k * n), *c = matrix((size_t)m * n);
		int ta = layout[0] == 'T', tb = layout[1] == 'T';
		float beta = ta ? 1 : 0;
		double rates[256];
		int samples = 0;
		for (double end = now() + seconds; samples < 256 && (samples < 3 || now() < end); samples++) {
			double best = 0;
			for (int w = 0; w < 5; w++) {
				double began = now(), took;
				int calls = 0;
				do {
					if (blas)
						blas(101, ta ? 112 : 111, tb ? 112 : 111, m, n, k, 1, a, ta ? m : k, b, tb ? k : n, beta, c, n);
					else
						dnnl(ta ? 'T' : 'N', tb ? 'T' : 'N', m, n, k, 1, a, ta ? m : k, b, tb ? k : n, beta, c, n);
					calls++;
					took = now() - began;
				} while (took < 1e-3);
				double rate = 2e-9 * m * n * k * calls / took;
				if (rate > best)
					best = rate;
			}
			rates[samples] = best;
		}
		qsort(rates, samples, sizeof *rates, by_size);
		printf("%s %d %d %d %.1f\n", layout, m, n, k, rates[samples / 2]);
		fflush(stdout);
		free(a);
		free(b);
		free(c);
	}
	return 0;
}
