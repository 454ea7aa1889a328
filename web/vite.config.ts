import react from '@vitejs/plugin-react'
import { defineConfig } from 'vitest/config'

/** `npm run dev` forwards requests to the API to the server at EVERSTEP_ENDPOINT_URL, by default on this machine. */
export default defineConfig({
  plugins: [react()],
  build: {
    outDir: '../control_plane/static',
    emptyOutDir: true,
    manifest: 'manifest.json', // the tests of the build read this file
    assetsInlineLimit: 0, // the Content-Security-Policy forbids data: URLs of scripts and fonts
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
