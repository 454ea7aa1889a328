import { Menu, useMantineColorScheme } from '@mantine/core'
import type { ReactElement } from 'react'
import { useNavigate } from 'react-router'

const SCHEMES = { auto: 'As the system', light: 'Light', dark: 'Dark' } as const

/** What the account button opens: theme, settings, sign out. */
export default function AccountMenu({ onClose, onSignOut, children }: { onClose: () => void; onSignOut: () => void; children: ReactElement }) {
  const navigate = useNavigate()
  const { colorScheme, setColorScheme } = useMantineColorScheme()
  return (
    <Menu opened position="bottom-end" withinPortal onClose={onClose}>
      <Menu.Target>{children}</Menu.Target>
      <Menu.Dropdown>
        <Menu.Label>Theme</Menu.Label>
        {(['auto', 'light', 'dark'] as const).map((scheme) => (
          <Menu.Item key={scheme} onClick={() => setColorScheme(scheme)} aria-current={colorScheme === scheme || undefined}>
            {SCHEMES[scheme]}
            {colorScheme === scheme ? ' ✓' : ''}
          </Menu.Item>
        ))}
        <Menu.Divider />
        <Menu.Item onClick={() => void navigate('/settings')}>Settings</Menu.Item>
        <Menu.Item onClick={onSignOut}>Sign out</Menu.Item>
      </Menu.Dropdown>
    </Menu>
  )
}
