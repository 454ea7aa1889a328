/**
 * In the built files, each page's first load is small enough for a phone, and nothing violates the
 * Content-Security-Policy.
 *
 * Runs after the build.
 */
import { existsSync, readFileSync, readdirSync, statSync } from 'node:fs'
import { join } from 'node:path'
import { describe, expect, test } from 'vitest'

const STATIC = join(import.meta.dirname, '../../control_plane/static')
const LIMIT_BYTES = 250 * 1000
/** Files in `src/pages/` that have no chunk of their own, because other pages import them. */
const PARTS_OF_PAGES = ['JobTabs.tsx', 'useVerdict.ts']

interface Chunk {
  file: string
  src?: string
  isDynamicEntry?: boolean
  isEntry?: boolean
  imports?: string[]
  css?: string[]
  /** Fonts and pictures of the chunk's styles. */
  assets?: string[]
}
const manifest = JSON.parse(readFileSync(join(STATIC, 'manifest.json'), 'utf8')) as Record<string, Chunk>
const entry = Object.keys(manifest).find((key) => manifest[key]!.isEntry)!

/** Return every file that a browser must load before it can show a page. */
function needed(...keys: string[]): Set<string> {
  const files = new Set<string>(['index.html'])
  const seen = new Set<string>()
  const add = (key: string) => {
    if (seen.has(key)) return
    seen.add(key)
    const chunk = manifest[key]!
    files.add(chunk.file)
    for (const file of [...(chunk.css ?? []), ...(chunk.assets ?? [])]) files.add(file)
    for (const each of chunk.imports ?? []) add(each)
  }
  keys.forEach(add)
  return files
}

/** Return the path of the file that the server sends: the gzipped copy, or the file itself for a compressed font. */
const sent = (file: string) => join(STATIC, file.endsWith('.woff2') ? file : `${file}.gz`)
const packed = (files: Iterable<string>) => [...files].reduce((sum, file) => sum + statSync(sent(file)).size, 0)

describe('the first load', () => {
  // A tab of a job needs the job's page as well.
  const pages = Object.keys(manifest).filter((key) => key.startsWith('src/pages/'))
  const JOB = 'src/pages/Job.tsx'
  test('every page is a chunk of its own', () =>
    expect(pages.length).toBeGreaterThanOrEqual(
      readdirSync(join(import.meta.dirname, '../src/pages')).length - PARTS_OF_PAGES.length,
    ))
  test.each(pages)('%s is at most 250 kB, gzipped', (page) => {
    const size = packed(needed(entry, ...(/\/Job[A-Z]/.test(page) ? [JOB, page] : [page])))
    console.info(`first load of ${page}: ${(size / 1000).toFixed(1)} kB gzipped`)
    expect(size).toBeGreaterThan(50_000)
    expect(size).toBeLessThanOrEqual(LIMIT_BYTES)
  })
})

test('index.html has no inline script and no inline style', () => {
  const html = readFileSync(join(STATIC, 'index.html'), 'utf8')
  expect(html).toContain('__CSP_NONCE__')
  expect(html).not.toMatch(/<script(?![^>]*\ssrc=)/)
  expect(html).not.toMatch(/<style|\sstyle=|\son\w+=/)
  expect(html).not.toMatch(/(src|href)="(https?:)?\/\//)
})

test('the runbook is there, has no script and asks for nothing from elsewhere', () => {
  const html = readFileSync(join(STATIC, 'runbook.html'), 'utf8')
  expect(html).toContain('<h3 id="taken-over">Taken over</h3>')
  expect(html).not.toMatch(/<script|<style|\sstyle=|\son\w+=|(src|href)="(https?:)?\/\//)
  for (const [, file] of html.matchAll(/href="\/(\w+\.\w+)"/g)) expect(existsSync(join(STATIC, file!))).toBe(true)
})

test('every file under /assets has a hash in its name, and a gzipped copy unless it is a font', () => {
  const files = readdirSync(join(STATIC, 'assets')).filter((file) => !file.endsWith('.gz'))
  expect(files.length).toBeGreaterThan(5)
  for (const file of files) {
    expect(file).toMatch(/-[\w-]{8}\.\w+$/)
    expect(existsSync(sent(`assets/${file}`))).toBe(true)
  }
})
