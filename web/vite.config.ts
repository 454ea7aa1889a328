import react from '@vitejs/plugin-react'
import { defineConfig } from 'vitest/config'

/** `npm run dev` passes the API on to a server: EVERSTEP_ENDPOINT_URL says which. */
export default defineConfig({
  plugins: [react()],
  build: {
    outDir: '../control_plane/static',
    emptyOutDir: true,
    manifest: 'manifest.json', // what the tests of the build go by
    assetsInlineLimit: 0, // a data: script or font would be refused by the Content-Security-Policy
    modulePreload: { polyfill: false },
    target: 'es2022',
  },
  server: { proxy: { '/v1': process.env.EVERSTEP_ENDPOINT_URL ?? 'http://127.0.0.1:8443' } },
  test: {
    include: ['test/**/*.test.{ts,tsx}'],
    setupFiles: ['test/setup.ts'],
    restoreMocks: true,
    testTimeout: 60_000,
  },
})
