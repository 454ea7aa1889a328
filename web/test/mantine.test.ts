/** The list of Mantine's stylesheets is what the imported components need: a component without its own looks broken, and no test of behaviour sees that. */
import { existsSync, globSync, readFileSync } from 'node:fs'
import { basename, dirname, join, resolve } from 'node:path'
import { expect, test } from 'vitest'

const WEB = join(import.meta.dirname, '..')
const MANTINE = join(WEB, 'node_modules/@mantine/core')
/** What every page of Mantine has. */
const BASE = ['baseline', 'default-css-variables', 'global']
const read = (file: string) => readFileSync(file, 'utf8')

/** Names of the class maps (`<Name>.module.mjs`) that a file reaches by imports. */
function classMaps(file: string, seen = new Set<string>()): Set<string> {
  if (seen.has(file) || !existsSync(file)) return new Set()
  seen.add(file)
  if (file.endsWith('.module.mjs')) return new Set([basename(file, '.module.mjs')])
  const imported = [...read(file).matchAll(/from\s*["'](\.[^"']+)["']/g)].map(([, path]) => resolve(dirname(file), path!))
  return new Set(imported.flatMap((each) => [...classMaps(each, seen)]))
}

test('mantine.css has a stylesheet for every component that is imported, and for what those are made of', () => {
  const listed = new Set([...read(join(WEB, 'src/mantine.css')).matchAll(/styles\/([\w-]+)\.css/g)].map(([, name]) => name!))
  const used = globSync('src/**/*.{ts,tsx}', { cwd: WEB }).flatMap((file) => [...read(join(WEB, file)).matchAll(/import \{([^}]+)\} from '@mantine\/core'/g)].flatMap(([, names]) => names!.split(',').map((name) => name.trim())))
  const components = [...new Set(used)].filter((name) => existsSync(join(MANTINE, `esm/components/${name}/${name}.mjs`)))
  expect(components.length).toBeGreaterThan(10)
  const needed = components.flatMap((name) => [...classMaps(join(MANTINE, `esm/components/${name}/${name}.mjs`))]).filter((name) => existsSync(join(MANTINE, `styles/${name}.css`)))
  expect(needed).toContain('Button')
  expect([...listed].sort()).toEqual([...new Set([...needed, ...BASE])].sort())
})
