/**
 * The application imports exactly the stylesheets of the Mantine components that it uses.
 *
 * Without its stylesheet, a component looks broken, and no test of behaviour notices this.
 */
import { existsSync, globSync, readFileSync } from 'node:fs'
import { basename, dirname, join, resolve } from 'node:path'
import { expect, test } from 'vitest'

const WEB = join(import.meta.dirname, '..')
const MANTINE = join(WEB, 'node_modules/@mantine/core')
/** Stylesheets of Mantine that belong to no single component. */
const BASE = ['baseline', 'default-css-variables', 'global']
const read = (file: string) => readFileSync(file, 'utf8')

/** Names of the class maps (`<Name>.module.mjs`) that a file reaches by imports. */
function classMaps(file: string, seen = new Set<string>()): Set<string> {
  if (seen.has(file) || !existsSync(file)) return new Set()
  seen.add(file)
  if (file.endsWith('.module.mjs')) return new Set([basename(file, '.module.mjs')])
  const imported = [...read(file).matchAll(/from\s*["'](\.[^"']+)["']/g)].map(([, path]) =>
    resolve(dirname(file), path!),
  )
  return new Set(imported.flatMap((each) => [...classMaps(each, seen)]))
}

const SOURCES = globSync('src/**/*.{ts,tsx}', { cwd: WEB }).map((file) => read(join(WEB, file)))
const IMPORTED = /import \{([^}]+)\} from '@mantine\/core'/g
const STYLES = /@mantine\/core\/styles\/([\w-]+)\.css/g

/** Names of the stylesheets of the components that a source imports, and of the components that those contain. */
function neededBy(source: string): string[] {
  const names = [...source.matchAll(IMPORTED)].flatMap(([, list]) => list!.split(',').map((name) => name.trim()))
  const files = names
    .map((name) => join(MANTINE, `esm/components/${name}/${name}.mjs`))
    .filter((file) => existsSync(file))
  const maps = files.flatMap((file) => [...classMaps(file)])
  return maps.filter((name) => existsSync(join(MANTINE, `styles/${name}.css`)))
}
const stylesOf = (source: string): string[] => [...source.matchAll(STYLES)].map(([, name]) => name!)

const everywhere = stylesOf(read(join(WEB, 'src/mantine.css')))

test('every source has the stylesheets of its components: those of mantine.css, and those that it imports', () => {
  for (const source of SOURCES) {
    const has = new Set([...everywhere, ...stylesOf(source)])
    expect(
      neededBy(source).filter((name) => !has.has(name)),
      source.split('\n')[0],
    ).toEqual([])
  }
})

test('every stylesheet belongs to a component that is imported', () => {
  const needed = new Set([...SOURCES.flatMap(neededBy), ...BASE])
  expect(needed).toContain('Button')
  expect([...everywhere, ...SOURCES.flatMap(stylesOf)].filter((name) => !needed.has(name))).toEqual([])
})
